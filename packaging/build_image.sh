#!/usr/bin/env bash
# Build a stage of the Containerfile on a base image that debootstrap makes, and run it: no image is downloaded.
#
#   packaging/build_image.sh [STAGE] [DIST] [FOLDER]
#
# STAGE is cpu, cuda or tpu; DIST holds the wheels (dist), FOLDER what is made on the way (build/packaging/image). Needs
# root, debootstrap, buildah, and pip, which downloads what Podscale depends on.
set -euo pipefail
cd "$(dirname "$0")/.."
stage=${1:-cpu}
dist=${2:-dist}
folder=${3:-build/packaging/image}
mkdir -p "$folder/wheels-$stage" "$folder/context"
folder=$(cd "$folder" && pwd)
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}  # no other service is needed

if ! buildah inspect --type image podscale-base >/dev/null 2>&1; then
    mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' | sed -n 's/^bookworm //p' | sort -u | head -1)
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$folder/root" "$mirror" >"$folder/debootstrap.log"
    rm -rf "$folder/root/var/cache/apt/archives" "$folder/root/var/lib/apt/lists"
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$folder/root" /
    buildah commit --quiet --rm "$base" podscale-base
fi

wheel=$(ls "$dist"/podscale-*_x86_64.whl)
case $stage in  # as in the Containerfile
cpu) extras= ;;
cuda) extras='[cuda13,cloud]' ;;
tpu) extras='[tpu,cloud]' ;;
*) echo "there is no stage $stage: cpu, cuda, tpu" >&2 && exit 2 ;;
esac
rm -f "$folder/wheels-$stage"/podscale-*.whl  # pip keeps a file of the same name, which may be of an earlier commit
python3.11 -m pip download --quiet --dest "$folder/wheels-$stage" "$wheel$extras"
rm -rf "$folder/context/dist"
mkdir "$folder/context/dist"
cp "$wheel" "$folder/context/dist"
sha256sum "$wheel"
buildah build --layers --target "$stage" --tag "podscale:$stage" --file packaging/Containerfile \
    --build-arg BASE=localhost/podscale-base --build-arg PIP_FIND_LINKS=/wheels --build-arg PIP_NO_INDEX=1 \
    --volume "$folder/wheels-$stage:/wheels:ro" "$folder/context"

run=$(buildah from "localhost/podscale:$stage")
trap 'buildah rm "$run" >/dev/null' EXIT
buildah run "$run" -- podscale --version
buildah run "$run" -- sh -c 'command -v gcc || echo "no compiler"'
buildah run "$run" -- podscale train digits --run /work/runs/digits
