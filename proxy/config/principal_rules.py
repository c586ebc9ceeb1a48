"""Rules that map a certificate's name to a role, in the form of Kafka's `ssl.principal.mapping.rules` (KIP-371).

`RULE:pattern/replacement/[LU]`: where the pattern matches the whole name, the role is the replacement, with `$1` for
the pattern's first group, in lower (L) or upper (U) case. `DEFAULT`: the name as it is. The first rule that fits is
taken.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.common.errors import ConfigError

_RULE = re.compile(r"RULE:((?:\\.|[^\\/])+)/((?:\\.|[^\\/])*)/([LU]?)", re.DOTALL)
_REPLACEMENT_PART = re.compile(r"\\(.)|\$(\d+)|([^\\$]+)", re.DOTALL)

_CASES: dict[str, Callable[[str], str]] = {"": str, "L": str.lower, "U": str.upper}


@dataclass(frozen=True, slots=True)
class PrincipalRule:
    """One rule: a pattern, the replacement as texts and numbers of groups, and the case."""

    pattern: re.Pattern[str]
    replacement: tuple[str | int, ...]
    case: str

    def apply(self, name: str) -> str | None:
        """Return the role, or None if the pattern does not match the whole name."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        parts = (part if isinstance(part, str) else match[part] or "" for part in self.replacement)
        return _CASES[self.case]("".join(parts))


DEFAULT = PrincipalRule(re.compile(".*", re.DOTALL), (0,), "")


def compile_principal_rules(rules: Sequence[str], key: str) -> tuple[PrincipalRule, ...]:
    """Compile all rules; without any, the name is the role. Raises ConfigError, which names the key and the index."""
    if "DEFAULT" in rules[:-1]:
        raise ConfigError(f"{key}[{rules.index('DEFAULT') + 1}]: never reached, for DEFAULT takes every name before it")
    return tuple(_compile(rule, f"{key}[{index}]") for index, rule in enumerate(rules)) or (DEFAULT,)


def map_principal(rules: Sequence[PrincipalRule], name: str) -> str | None:
    """Return the role by the first rule that fits, None if none does. The caller bounds the name's length."""
    return next((role for rule in rules if (role := rule.apply(name)) is not None), None)


def _compile(rule: str, key: str) -> PrincipalRule:
    if rule == "DEFAULT":
        return DEFAULT
    parts = _RULE.fullmatch(rule)
    if parts is None:
        raise ConfigError(f"{key}: neither DEFAULT nor RULE:pattern/replacement/[LU] (a slash within is written \\/)")
    pattern, replacement, case = parts.groups()
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{key}: no valid regular expression: {error}") from None
    return PrincipalRule(compiled, _replacement(replacement, compiled.groups, key), case)


def _replacement(text: str, groups: int, key: str) -> tuple[str | int, ...]:
    parts: list[str | int] = []
    at = 0
    while at < len(text):
        part = _REPLACEMENT_PART.match(text, at)
        if part is None:
            raise ConfigError(f"{key}: a $ in the replacement names a group by its number; a plain one is written \\$")
        escaped, group, plain = part.groups()
        if group is not None and (len(group) > 2 or int(group) > groups):  # noqa: PLR2004 -- two digits
            raise ConfigError(f"{key}: the replacement names group {group[:8]}, the pattern has {groups}")
        parts.append(int(group) if group is not None else escaped or plain)
        at = part.end()
    return tuple(parts)
