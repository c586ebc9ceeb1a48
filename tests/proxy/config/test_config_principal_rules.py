"""proxy.config.principal_rules: Kafka's form of rules, each one that is broken refused with its key."""

from __future__ import annotations

import pytest

from proxy.common.errors import ConfigError
from proxy.config.principal_rules import compile_principal_rules, map_principal

DN = "CN=Alice,OU=payments,O=Acme,C=US"


def mapped(name: str, *rules: str) -> str | None:
    return map_principal(compile_principal_rules(rules, "key"), name)


@pytest.mark.parametrize(
    ("rules", "role"),
    [
        ([], DN),
        (["DEFAULT"], DN),
        (["RULE:CN=([^,]+),.*/$1/"], "Alice"),
        (["RULE:CN=([^,]+),.*/$1/L"], "alice"),
        (["RULE:CN=([^,]+),.*/$1/U"], "ALICE"),
        (["RULE:^CN=([^,]+),OU=([^,]+),.*$/$2-$1/"], "payments-Alice"),
        (["RULE:CN=bob.*/bob/", "RULE:CN=Alice.*/first/", "RULE:CN=Alice.*/second/"], "first"),
        (["RULE:CN=bob.*/bob/", "DEFAULT"], DN),
        (["RULE:CN=bob.*/bob/"], None),
        (["RULE:CN=(Alice)(X)?,.*/$1$2/"], "Alice"),
        ([r"RULE:CN=.*/a\/\$1\\b/"], r"a/$1\b"),
        ([r"RULE:(CN\/)?.*/x/"], "x"),
    ],
)
def test_the_first_rule_that_fits_makes_the_role(rules: list[str], role: str | None) -> None:
    assert mapped(DN, *rules) == role


@pytest.mark.parametrize("pattern", ["Alice", "CN=Alice", "CN=Alice$|C=US", "C=US", "CN=bob|CN=Alice"])
def test_a_pattern_must_match_the_whole_name(pattern: str) -> None:
    """As in Kafka: an operator who forgets an anchor gives no role away."""
    assert mapped(DN, f"RULE:{pattern}/admin/") is None


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("default", "neither"),
        ("RULE:", "neither"),
        ("RULE:a", "neither"),
        ("RULE:a/b", "neither"),
        ("RULE://b/", "neither"),
        ("RULE:a/b/X", "neither"),
        ("RULE:a/b/LU", "neither"),
        ("RULE:spiffe://a/b/", "neither"),
        ("RULE:(a/b/", "no valid regular expression"),
        ("RULE:a{99999999999999999999}/b/", "no valid regular expression"),
        ("RULE:" + "(" * 5000 + ")" * 5000 + "/b/", "no valid regular expression"),
        ("RULE:(a)/$2/", "group 2"),
        ("RULE:(a)/" + "$" + "1" * 5000 + "/", "group 1111"),
        ("RULE:(a)/$/", "plain one"),
        ("RULE:(a)/${a}/", "plain one"),
    ],
)
def test_a_broken_rule_is_refused_with_its_key(rule: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        mapped("a", "RULE:x/y/", rule)
    assert str(caught.value).startswith("key[1]: ")


def test_a_rule_behind_default_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key\[2\]: never reached"):
        mapped("a", "RULE:x/y/", "DEFAULT", "RULE:a/b/")
