#!/bin/sh
# Writes headers.txt: every function of the driver API that the published CUDA headers declare.
#
# A line is a name and the first and last CUDA version whose headers have it. A name is an exported symbol, or
# for a type of cuda*Typedefs.h what cuGetProcAddress is asked for, and how many arguments the function has:
# <base>@<version>[/ptds|/ptsz]=<arguments>.
#
# Needs pip and unzip, and the network once: ./headers.sh > headers.txt
set -eu
. "$(dirname "$0")/../common/published.sh"

# Prototypes, what names without a suffix stand for, and types of functions.
names() {
    sed -n \
        -e 's/.*CUDAAPI  *\(cu[A-Za-z0-9_]*\) *(.*/\1/p' \
        -e 's/^ *# *define  *cu[A-Za-z0-9_]*  *\(cu[A-Za-z0-9_]*\) *$/\1/p' \
        -e 's/^ *# *define  *cu[A-Za-z0-9_]*  *__CUDA_API_PT\(DS\|SZ\)(\(cu[A-Za-z0-9_]*\)) *$/\2/p' \
        -e 's/.*CUDAAPI *\* *PFN_\(cu[A-Za-z0-9_]*\)_v\([0-9]*\))(\(.*\));.*/\1@\2 \3/p' \
        -e 's/.*CUDAAPI *\* *PFN_\(cu[A-Za-z0-9_]*\)_v\([0-9]*\)_\(pt[ds][sz]\))(\(.*\));.*/\1@\2\/\3 \4/p' |
        awk 'NF > 1 { count = $2 == "void" ? 0 : gsub(",", "") + 1; print $1 "=" count; next } { print }'
}

echo "# Written by headers.sh from the headers of CUDA 11.8, 12.0, 12.4, 12.9, 13.0 and 13.5."
published '*/include/cuda.h' '*/include/cuda*Typedefs.h' <<END
11.8 nvidia-cuda-runtime-cu11==11.8.89 92d04069a987e1fbc9213f8376d265df0f7bb42617d44f5eda1f496acea7f2d1
12.0 nvidia-cuda-runtime-cu12==12.0.146 18c038592af387684812fa712642aa9a26c12da80acb488b6709f7cced147f71
12.4 nvidia-cuda-runtime-cu12==12.4.127 64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5
12.9 nvidia-cuda-runtime-cu12==12.9.79 25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3
13.0 nvidia-cuda-runtime==13.0.96 7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
13.5 nvidia-cuda-runtime==13.5.37 df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d
END
