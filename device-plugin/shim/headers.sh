#!/bin/sh
# Writes headers.txt: every function of the driver API that the published CUDA headers declare.
#
# A line is a name and the first and last CUDA version whose headers have it. A name is an exported symbol, or
# for a type of cuda*Typedefs.h what cuGetProcAddress is asked for: <base>@<version>[/ptds|/ptsz].
#
# Needs pip and unzip, and the network once: ./headers.sh > headers.txt
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

while read -r cuda package sum; do
    printf '%s --hash=sha256:%s\n' "$package" "$sum" > "$work/requirements"
    pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux1_x86_64 \
        --dest "$work/$cuda" --requirement "$work/requirements" >&2
    unzip -q -p "$work/$cuda"/*.whl '*/include/cuda.h' '*/include/cuda*Typedefs.h' > "$work/$cuda.h"
    {
        # Prototypes, and what names without a suffix stand for.
        sed -n 's/.*CUDAAPI  *\(cu[A-Za-z0-9_]*\) *(.*/\1/p' "$work/$cuda.h"
        sed -n 's/^ *# *define  *cu[A-Za-z0-9_]*  *\(cu[A-Za-z0-9_]*\) *$/\1/p' "$work/$cuda.h"
        sed -n 's/^ *# *define  *cu[A-Za-z0-9_]*  *__CUDA_API_PT\(DS\|SZ\)(\(cu[A-Za-z0-9_]*\)) *$/\2/p' "$work/$cuda.h"
        sed -n 's/.*CUDAAPI *\* *PFN_\(cu[A-Za-z0-9_]*\)_v\([0-9]*\))(.*/\1@\2/p' "$work/$cuda.h"
        sed -n 's/.*CUDAAPI *\* *PFN_\(cu[A-Za-z0-9_]*\)_v\([0-9]*\)_\(pt[ds][sz]\))(.*/\1@\2\/\3/p' "$work/$cuda.h"
    } | sort -u | sed "s/\$/ $cuda/" >> "$work/all"
done <<END
11.8 nvidia-cuda-runtime-cu11==11.8.89 92d04069a987e1fbc9213f8376d265df0f7bb42617d44f5eda1f496acea7f2d1
12.0 nvidia-cuda-runtime-cu12==12.0.146 18c038592af387684812fa712642aa9a26c12da80acb488b6709f7cced147f71
12.4 nvidia-cuda-runtime-cu12==12.4.127 64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5
12.9 nvidia-cuda-runtime-cu12==12.9.79 25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3
13.0 nvidia-cuda-runtime==13.0.96 7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
13.5 nvidia-cuda-runtime==13.5.37 df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d
END

echo "# Written by headers.sh from the headers of CUDA 11.8, 12.0, 12.4, 12.9, 13.0 and 13.5."
LC_ALL=C sort -k1,1 -k2,2V "$work/all" |
    awk '$1 != name { if (name) print name, first, last; name = $1; first = $2 } { last = $2 } END { print name, first, last }'
