"""The changes that make a server of Helm: Helm's own `helm template`, which renders again without a new start.

A start and the compilation of values.schema.json are three quarters of what `helm template` takes. All else is Helm's.
"""

from __future__ import annotations

from pathlib import Path

Change = tuple[str, str, str]
"""A file of the module, a text that is there once, and what replaces it; without such a text the file is new."""

FUNCTION = "// ValidateAgainstSingleSchema checks"
COMPILED = """// compiled holds the schemas by their text.
var compiled = map[string]*jsonschema.Schema{}

"""
READ = "	schema, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemaJSON))\n"
LOOK_UP = """	if found := compiled[string(schemaJSON)]; found != nil {
		if err := found.Validate(values.AsMap()); err != nil {
			return JSONSchemaValidationError{err}
		}
		return nil
	}
"""
COMPILE = '	validator, err := compiler.Compile("file:///values.schema.json")\n'
KEEP = "	compiled[string(schemaJSON)] = validator\n"


def changes_of_helm(validation: str) -> tuple[Change, ...]:
    """Return the changes, for a version of Helm that validates values in this file."""
    return (
        ("cmd/helm/serve.go", "", Path(__file__).with_name("helm_server.go").read_text()),
        ("cmd/helm/helm.go", "cmd.Execute()", "serve(cmd)"),
        (validation, FUNCTION, COMPILED + FUNCTION),
        (validation, READ, LOOK_UP + READ),
        (validation, COMPILE, COMPILE + KEEP),
    )


def apply(changes: tuple[Change, ...], source: Path) -> None:
    """Change a copy of Helm's module; an error if a text is not there exactly once."""
    for name, old, new in changes:
        text = (source / name).read_text() if old else ""
        if old and text.count(old) != 1:
            raise ValueError(f"{name} has not exactly one {old!r}")
        (source / name).write_text(text.replace(old, new) if old else new)
