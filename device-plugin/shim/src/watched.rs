//! A trampoline for every function that is forwarded and whose answer is looked at: errors of work that went before
//! come to light there, and those that poison the context are acted on ([`crate::poison`]).
//!
//! It calls where a forwarder jumps. Arguments stay in their registers, which is why the table has functions
//! here only that take no more than six; a success costs the call and one comparison.

#[cfg(target_arch = "x86_64")]
macro_rules! watch {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                // Aligned for the call.
                "sub rsp, 8",
                "mov r11d, {index}",
                "call qword ptr [rip + {slots} + {offset}]",
                "add rsp, 8",
                "test eax, eax",
                "jnz 2f",
                "ret",
                "2:",
                "mov edi, eax",
                "jmp {noticed}",
                index = const $index,
                offset = const $index * 8,
                slots = sym SLOTS,
                noticed = sym crate::poison::noticed,
            )
        }
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! watch {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "stp x29, x30, [sp, #-16]!",
                "mov x29, sp",
                "adrp x16, {slots}",
                "add x16, x16, :lo12:{slots}",
                "mov x17, {index}",
                "ldr x16, [x16, x17, lsl #3]",
                "blr x16",
                "ldp x29, x30, [sp], #16",
                "cbnz w0, 2f",
                "ret",
                "2:",
                "b {noticed}",
                slots = sym SLOTS,
                index = const $index,
                noticed = sym crate::poison::noticed,
            )
        }
    };
}
