//! Calls the C library's loader, whatever C library the container has.
//!
//! The entry may need no library that programs do not load anyway. glibc before 2.34 has `dlopen`
//! in libdl, which not every program loads, and in libc a private form of it
//! (`__libc_dlopen_mode`), which 2.34 dropped. So each name is weak, and one that is there is
//! called. musl has `dlopen`.
//!
//! A program may preload a library with a `dlopen` of its own, whose constructor runs after the
//! entry's. So the entry takes the next `dlopen` in the order of libraries, which is the C
//! library's.

use core::ffi::{CStr, c_char, c_int, c_void};

/// `RTLD_NOW | RTLD_LOCAL`
const FLAGS: c_int = 2;

/// Opens a library, or again one that is open. Returns null when it cannot be opened.
pub(crate) fn open(path: &CStr) -> *mut c_void {
    // SAFETY: the shim's constructors only save the start state.
    unsafe { bursar_dlopen(path.as_ptr(), FLAGS) }
}

/// Returns the address of a symbol of an open library, or null.
///
/// The name has to end with a zero.
pub(crate) fn symbol(library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the handle is open for ever; the name is one of the generated ones.
    unsafe { bursar_dlsym(library, name) }
}

/// Returns the id of this process.
pub(crate) fn process_id() -> c_int {
    // SAFETY: the call takes nothing.
    unsafe { getpid() }
}

unsafe extern "C" {
    fn getpid() -> c_int;
    fn bursar_dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn bursar_dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".weak bursar_weak_dlopen",
    ".weak bursar_weak_dlsym",
    ".weak bursar_weak_dlvsym",
    // The version that every glibc has; the default one of a new glibc is missing in an old one.
    ".symver bursar_weak_dlopen, dlopen@GLIBC_2.2.5",
    ".symver bursar_weak_dlsym, dlsym@GLIBC_2.2.5",
    ".symver bursar_weak_dlvsym, dlvsym@GLIBC_2.2.5",
    ".weak __libc_dlopen_mode",
    ".weak __libc_dlsym",
    ".hidden bursar_dlopen",
    ".hidden bursar_dlsym",
    ".globl bursar_dlopen",
    ".globl bursar_dlsym",
    ".text",
    "bursar_dlopen:",
    "mov rax, qword ptr [rip + __libc_dlopen_mode@GOTPCREL]",
    "test rax, rax",
    "jz 2f",
    // __RTLD_DLOPEN
    "or esi, 0x80000000",
    "jmp rax",
    "2:",
    "mov rax, qword ptr [rip + bursar_weak_dlvsym@GOTPCREL]",
    "test rax, rax",
    "jz 3f",
    "push rdi",
    "push rsi",
    "sub rsp, 8",
    // RTLD_NEXT
    "mov rdi, -1",
    "lea rsi, [rip + 5f]",
    "lea rdx, [rip + 6f]",
    "call rax",
    "add rsp, 8",
    "pop rsi",
    "pop rdi",
    "test rax, rax",
    "jnz 4f",
    "3:",
    "mov rax, qword ptr [rip + bursar_weak_dlopen@GOTPCREL]",
    "test rax, rax",
    "jz 7f",
    "4:",
    "jmp rax",
    "5:",
    ".asciz \"dlopen\"",
    "6:",
    ".asciz \"GLIBC_2.2.5\"",
    "bursar_dlsym:",
    "mov rax, qword ptr [rip + __libc_dlsym@GOTPCREL]",
    "test rax, rax",
    "jnz 4b",
    "mov rax, qword ptr [rip + bursar_weak_dlsym@GOTPCREL]",
    "test rax, rax",
    "jnz 4b",
    "7:",
    "xor eax, eax",
    "ret",
);

// A build for AArch64 has the `dlopen` of an old glibc, in libdl, as `included/old_glibc.rs` says.
#[cfg(not(target_arch = "x86_64"))]
core::arch::global_asm!(
    ".globl bursar_dlopen",
    ".hidden bursar_dlopen",
    "bursar_dlopen: b dlopen",
    ".globl bursar_dlsym",
    ".hidden bursar_dlsym",
    "bursar_dlsym: b dlsym",
);
