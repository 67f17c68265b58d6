//! Prints the linker arguments of both shims. Part of their build scripts.

/// Prints the arguments for a library that replaces the driver's library of this name.
pub(crate) fn print_link_args(soname: &str) {
    let argument = |argument: &str| println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    argument(&format!("-soname,{soname}"));
    // Binds the library's calls of its own hooks inside it, whatever another library exports.
    argument("-Bsymbolic-functions");
    if std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        // A glibc before 2.34 has the functions that `old_glibc` binds to in these libraries.
        argument("--no-as-needed,-l:libdl.so.2,-l:libpthread.so.0,--as-needed");
        // A glibc before 2.18 lacks this function. Without it the standard library runs a thread's
        // destructors by a pthread key.
        argument("--defsym=__cxa_thread_atexit_impl=0");
        // Those destructors do not survive `dlclose`, nor may a program forget its charges by one.
        argument("-z,nodelete");
    }
}
