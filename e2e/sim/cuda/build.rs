//! Sets the real driver's SONAME, and binds the library's calls of its own functions to itself.
//!
//! Otherwise another loaded library with functions of the same names could intercept these calls.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
