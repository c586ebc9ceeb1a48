#!/bin/sh
# install.sh NAME REQUIREMENTS: in a build stage, put the wheel and its dependencies into /opt/NAME, without pip, and their
# bill of materials into /usr/share/sbom. Wheels only, so that no compiler is needed (PySpark has no wheel, and is only
# Python and jars); equal input gives equal files.
set -eu
name=$1 requirements=$2
target=/opt/$name
wheel=$(echo dist/*.whl)
python3 -m venv --without-pip "$target"
pip="tools/bin/pip --python $target/bin/python3 install --quiet --no-compile"
$pip --only-binary :all: --no-binary pyspark --require-hashes -r "requirements/$requirements.txt"
$pip --no-deps "$wheel"
# Bytecode with a hash of the source instead of its time, never checked at run time: the file system is read-only. One process compiles in the order of names.
"$target/bin/python3" -m compileall -q -j 1 --invalidation-mode unchecked-hash "$target/lib"
mkdir -p /usr/share/sbom
tools/bin/cyclonedx-py environment --output-reproducible --output-format JSON --pyproject tree/pyproject.toml \
  --output-file "/usr/share/sbom/$name.cdx.json" "$target/bin/python3"
