# Reads what published headers declare. Sourced by headers.sh of each shim; needs pip and unzip, and the network.
#
# published PATTERN... < list: for each line `<cuda version> <package>==<version> <sha256>` it hands the package's
# files of these patterns to the function `names`, and prints each name with the first and last version that has it.
published() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    while read -r cuda package sum; do
        printf '%s --hash=sha256:%s\n' "$package" "$sum" > "$work/requirements"
        pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
            --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux1_x86_64 \
            --dest "$work/$cuda" --requirement "$work/requirements" >&2
        unzip -q -p "$work/$cuda"/*.whl "$@" | names | sort -u | sed "s/\$/ $cuda/" >> "$work/all"
    done
    LC_ALL=C sort -k1,1 -k2,2V "$work/all" |
        awk '$1 != name { if (name) print name, first, last; name = $1; first = $2 } { last = $2 } END { print name, first, last }'
}
