//! Binds the library to symbols of glibc 2.17 and older, whatever glibc it is built on.
//!
//! A build on a new glibc binds `dlsym`, `stat64` and others to versions of 2.28 to 2.34. A
//! container with an older glibc could not load that library, which is preloaded into every program
//! there. Each function here is hidden and precedes glibc's when this library is linked. It jumps
//! to the oldest version of the same function, or makes the system call.
//!
//! `build/link_args.rs` defines away `__cxa_thread_atexit_impl` of 2.18, which the standard library
//! can do without. A test checks the bound of 2.17. On aarch64 the library must be built on an old
//! glibc, because there the same is missing for versions 2.33 and 2.34.

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(test)))]
core::arch::global_asm!(
    // Before 2.34 these were in libdl and libpthread, which build/link_args.rs keeps as needed.
    ".symver bursar_old_dlopen, dlopen@GLIBC_2.2.5",
    ".symver bursar_old_dlsym, dlsym@GLIBC_2.2.5",
    ".symver bursar_old_key_create, pthread_key_create@GLIBC_2.2.5",
    ".symver bursar_old_key_delete, pthread_key_delete@GLIBC_2.2.5",
    ".symver bursar_old_setspecific, pthread_setspecific@GLIBC_2.2.5",
    // Before 2.33 stat was a macro over these, whose first argument is the structure's version: 1.
    ".symver bursar_old_xstat64, __xstat64@GLIBC_2.2.5",
    ".symver bursar_old_fxstat64, __fxstat64@GLIBC_2.2.5",
    ".symver bursar_old_fxstatat64, __fxstatat64@GLIBC_2.4",
    ".macro bursar_hidden name",
    ".globl \\name",
    ".hidden \\name",
    ".type \\name, @function",
    "\\name:",
    ".endm",
    ".text",
    "bursar_hidden dlopen",
    "jmp bursar_old_dlopen@PLT",
    "bursar_hidden dlsym",
    "jmp bursar_old_dlsym@PLT",
    "bursar_hidden pthread_key_create",
    "jmp bursar_old_key_create@PLT",
    "bursar_hidden pthread_key_delete",
    "jmp bursar_old_key_delete@PLT",
    "bursar_hidden pthread_setspecific",
    "jmp bursar_old_setspecific@PLT",
    "bursar_hidden stat64",
    "mov rdx, rsi",
    "mov rsi, rdi",
    "mov edi, 1",
    "jmp bursar_old_xstat64@PLT",
    "bursar_hidden fstat",
    "bursar_hidden fstat64",
    "mov rdx, rsi",
    "mov esi, edi",
    "mov edi, 1",
    "jmp bursar_old_fxstat64@PLT",
    "bursar_hidden fstatat64",
    "mov r8d, ecx",
    "mov rcx, rdx",
    "mov rdx, rsi",
    "mov esi, edi",
    "mov edi, 1",
    "jmp bursar_old_fxstatat64@PLT",
    "bursar_hidden gettid",
    "mov eax, 186",
    "syscall",
    "ret",
    "bursar_hidden getrandom",
    "mov eax, 318",
    "syscall",
    "jmp 2f",
    "bursar_hidden statx",
    "mov r10, rcx",
    "mov eax, 332",
    "syscall",
    // Turns a system call's error into errno, as glibc does.
    "2:",
    "cmp rax, -4095",
    "jae 3f",
    "ret",
    "3:",
    "neg eax",
    "push rax",
    "call __errno_location@PLT",
    "pop rcx",
    "mov dword ptr [rax], ecx",
    "mov rax, -1",
    "ret",
);
