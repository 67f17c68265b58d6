//! Defines the trampolines of AArch64, by AAPCS64: x16 and x17 belong to linkage code, x9 to x15
//! are scratch.

/// Exports a function that jumps through its slot in the table `$slots`, with the index in x17.
#[macro_export]
macro_rules! forward {
    ($name:ident, $slots:path, $index:literal) => {
        $crate::naked! {
            #[unsafe(no_mangle)]
            $name:
            "adrp x16, {slots}",
            "add x16, x16, :lo12:{slots}",
            "mov x17, {index}",
            "ldr x16, [x16, x17, lsl #3]",
            "br x16",
            slots = sym $slots,
            index = const $index,
        }
    };
}

/// Exports a function as [`forward!`] does, with a table whose slots are null before their first
/// call, so that a loader has nothing to write into it. The first call goes to `$lazy`.
#[macro_export]
macro_rules! forward_from_null {
    ($name:ident, $slots:path, $index:literal, $lazy:path) => {
        $crate::naked! {
            #[unsafe(no_mangle)]
            $name:
            "adrp x16, {slots}",
            "add x16, x16, :lo12:{slots}",
            "mov x17, {index}",
            "ldr x16, [x16, x17, lsl #3]",
            "cbz x16, 2f",
            "br x16",
            "2:",
            "b {lazy}",
            slots = sym $slots,
            index = const $index,
            lazy = sym $lazy,
        }
    };
}

/// Exports a function that calls the target of [`forward!`] and passes a result that is no success
/// to `on_error`. Eight arguments stay in their registers; the others are copied, the last first.
#[macro_export]
macro_rules! watch {
    ($name:ident, $slots:path, $index:literal, $arguments:literal, $on_error:path) => {
        $crate::naked! {
            #[unsafe(no_mangle)]
            $name:
            ".cfi_startproc",
            "stp x29, x30, [sp, #-16]!",
            ".cfi_def_cfa_offset 16",
            ".cfi_offset w30, -8",
            ".cfi_offset w29, -16",
            "mov x29, sp",
            ".cfi_def_cfa_register w29",
            "sub sp, sp, {room}",
            "add x9, x29, 16 + 8 * {words}",
            "add x10, sp, 8 * {words}",
            ".rept {words}",
            "ldr x11, [x9, #-8]!",
            "str x11, [x10, #-8]!",
            ".endr",
            "adrp x16, {slots}",
            "add x16, x16, :lo12:{slots}",
            "mov x17, {index}",
            "ldr x16, [x16, x17, lsl #3]",
            "blr x16",
            "mov sp, x29",
            ".cfi_def_cfa_register sp",
            "ldp x29, x30, [sp], #16",
            ".cfi_def_cfa_offset 0",
            ".cfi_restore w30",
            ".cfi_restore w29",
            "cbnz w0, 2f",
            "ret",
            "2:",
            "b {on_error}",
            ".cfi_endproc",
            words = const ($arguments as usize).saturating_sub(8),
            room = const 8 * ($arguments as usize).saturating_sub(8).next_multiple_of(2),
            slots = sym $slots,
            index = const $index,
            on_error = sym $on_error,
        }
    };
}

/// Defines the target of every slot's first call, with the index in x17: calls `resolve` and jumps
/// to the result. Preserves the argument registers and the caller's stack.
#[macro_export]
macro_rules! at_first_call {
    ($name:ident, $resolve:ident) => {
        $crate::naked! {
            $name:
            "stp x29, x30, [sp, #-224]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "str x8, [sp, #80]",
            "stp q0, q1, [sp, #96]",
            "stp q2, q3, [sp, #128]",
            "stp q4, q5, [sp, #160]",
            "stp q6, q7, [sp, #192]",
            "mov x0, x17",
            "bl {resolve}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x2, x3, [sp, #32]",
            "ldp x4, x5, [sp, #48]",
            "ldp x6, x7, [sp, #64]",
            "ldr x8, [sp, #80]",
            "ldp q0, q1, [sp, #96]",
            "ldp q2, q3, [sp, #128]",
            "ldp q4, q5, [sp, #160]",
            "ldp q6, q7, [sp, #192]",
            "ldp x29, x30, [sp], #224",
            "br x16",
            resolve = sym $resolve,
        }
    };
}
