//! How both shims are linked. Part of their build scripts.

/// Prints the arguments for a library that takes the place of the driver's of this name.
pub(crate) fn print_link_args(soname: &str) {
    let argument = |argument: &str| println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    argument(&format!("-soname,{soname}"));
    // What the library means by a hook is its own, whatever another library calls the same.
    argument("-Bsymbolic-functions");
    if std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        // Where a glibc before 2.34 has what `old_glibc` binds to.
        argument("--no-as-needed,-l:libdl.so.2,-l:libpthread.so.0,--as-needed");
        // Came with glibc 2.18. The standard library does without it where it is not there: a thread's
        // destructors are run by a key of pthread's.
        argument("--defsym=__cxa_thread_atexit_impl=0");
        // That knows nothing of `dlclose`; nor may a program's charges be forgotten by one.
        argument("-z,nodelete");
    }
}
