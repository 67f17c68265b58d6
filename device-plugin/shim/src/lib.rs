//! `libcuda.so.1` as a container sees it.
