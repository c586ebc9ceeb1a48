#!/bin/sh
# install.sh NAME REQUIREMENTS: in a build stage, put the wheel and its dependencies into /opt/NAME, without pip, and their
# bill of materials into /usr/share/sbom. Wheels only, so that no compiler is needed; PySpark has none, is only Python and
# jars, and is built with the listed tools, which stay outside. Equal input gives equal files.
set -eu
name=$1 requirements=$2
target=/opt/$name
wheel=$(echo dist/*.whl)
python3 -m venv --without-pip "$target"
pip="tools/bin/pip --python $target/bin/python3 install --quiet --no-compile"
list=requirements/$requirements.txt
tools/bin/pip wheel --quiet --no-deps --no-build-isolation --require-hashes --wheel-dir wheels -r "$list"
# By name and version: pip has checked the hashes, and a built wheel has another one than its source.
$pip --no-deps --no-index --find-links wheels $(sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' "$list")
$pip --no-deps "$wheel"
tools/bin/pip --python "$target/bin/python3" check
# Bytecode with a hash of the source instead of its time, never checked at run time: the file system is read-only. One process compiles in the order of names.
"$target/bin/python3" -m compileall -q -j 1 --invalidation-mode unchecked-hash "$target/lib"
mkdir -p /usr/share/sbom
tools/bin/cyclonedx-py environment --output-reproducible --output-format JSON --pyproject tree/pyproject.toml \
  --output-file "/usr/share/sbom/$name.cdx.json" "$target/bin/python3"
