#!/usr/bin/env bash
# Install the x86-64 wheel into a bare Debian 12 that has no compiler, and train there: digits, and a folder of photos.
#
#   packaging/bare_system.sh [DIST] [FOLDER]
#
# DIST holds the wheels (dist), FOLDER is where the system is made (build/packaging/bare); an existing one is used again.
# Needs root, debootstrap, and pip, which downloads what Podscale depends on: inside, nothing is fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=${1:-dist}
folder=${2:-build/packaging/bare}
wheel=$(ls "$dist"/podscale-*_x86_64.whl)
mkdir -p "$folder/wheels"
folder=$(cd "$folder" && pwd)
root=$folder/root

# The mirror that this machine's apt uses.
mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' | sed -n 's/^bookworm //p' | sort -u | head -1)
[ -x "$root/usr/bin/python3" ] ||
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$mirror" >"$folder/debootstrap.log"
rm -f "$folder"/wheels/podscale-*.whl  # pip keeps a file of the same name, which may be of an earlier commit
python3.11 -m pip download --quiet --dest "$folder/wheels" "$wheel"
rm -rf "$root/wheels" "$root/opt/podscale" "$root/root/photos" "$root/root/runs"
cp -r "$folder/wheels" "$root/wheels"
cp examples/make_photos.py "$root/root"
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
trap 'umount "$root/proc"' EXIT

inside() {
    echo "\$ $*"
    chroot "$root" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 COLUMNS=100 PATH=/opt/podscale/bin:/usr/bin:/bin \
        sh -c "cd /root && $*" 2>&1
}

inside '. /etc/os-release; echo "$PRETTY_NAME, $(ldd --version | head -1), $(python3 --version)"'
inside 'command -v gcc cc clang c99 || echo "no compiler"'
inside 'find / -xdev -name "libjpeg*" -not -path "/wheels/*" | grep . || echo "no libjpeg"'
inside 'python3 -m venv /opt/podscale'
inside 'sha256sum /wheels/podscale-*.whl'
inside 'pip install --quiet --no-index --find-links /wheels /wheels/podscale-*.whl'
inside 'podscale --version'
inside 'python -c "from podscale.data import decode; from podscale.processes import _abort; print(decode.native.__file__)"'
inside 'podscale train digits --run runs/digits'
inside 'python make_photos.py photos'
inside 'podscale data check photos || echo "exit code $?"'  # it has a damaged file and a copy
inside 'podscale train imagefolder-small --data.path photos --train.epochs 4 --run runs/photos'
