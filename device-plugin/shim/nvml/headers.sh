#!/bin/sh
# Writes headers.txt: every function that the published headers of NVML declare.
#
# A line is a name and the first and last CUDA version whose nvml.h has it.
#
# Needs pip and unzip, and the network once: ./headers.sh > headers.txt
set -eu
. "$(dirname "$0")/../common/published.sh"

names() {
    sed -n 's/.*DECLDIR  *\(nvml[A-Za-z0-9_]*\) *(.*/\1/p'
}

echo "# Written by headers.sh from the headers of CUDA 11.7, 11.8, 12.0, 12.9, 13.0, 13.4 and 13.5."
published '*/include/nvml.h' <<END
11.7 nvidia-nvml-dev-cu11==11.7.91 97ffd106d96757dd9c8b526437fc2d7b28ce841f1437e70f254a93e0f6e988f2
11.8 nvidia-nvml-dev-cu11==11.8.86 f5ad92d9563145137a26ca1b75cda26159125555109ccc303144a0b05b8531e6
12.0 nvidia-nvml-dev-cu12==12.0.76 2f4dc66dc3af6088f2d9d5e107c2944b181983e2edd7b7683992392fb7bb0b04
12.9 nvidia-nvml-dev-cu12==12.9.79 8bb367913c62cb65be9ae386c58dbf573f1f9e2f01cae54abb87bf5f63c6069e
13.0 nvidia-nvml-dev==13.0.39 2d46f9865e0d42bd05eb302b86523a78f92f3b692bab9b63aa7557296dce3048
13.4 nvidia-nvml-dev==13.4.92 90b65cebefd02a1e695675177c9d7886f48322906ce5c03398e8cb27cc5ad2d6
13.5 nvidia-nvml-dev==13.5.37 7394fcbefa9ba537e8238cbb1caa4cd2db6bbfbff208d217a8a884947113ae6d
END
