//! Defines the trampolines of x86-64, by the System V ABI: r10 and r11 are scratch between caller
//! and callee.

/// Exports a function that jumps through its slot in the table `$slots`, with the index in r11.
#[macro_export]
macro_rules! forward {
    ($name:ident, $slots:path, $index:literal) => {
        $crate::naked! {
            #[unsafe(no_mangle)]
            $name:
            "mov r11d, {index}",
            "jmp qword ptr [rip + {slots} + {offset}]",
            index = const $index,
            offset = const $index * 8,
            slots = sym $slots,
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
            "mov r11, qword ptr [rip + {slots} + {offset}]",
            "test r11, r11",
            "jz 2f",
            "jmp r11",
            "2:",
            "mov r11d, {index}",
            "jmp {lazy}",
            index = const $index,
            offset = const $index * 8,
            slots = sym $slots,
            lazy = sym $lazy,
        }
    };
}

/// Exports a function that calls the target of [`forward!`] and passes a result that is no success
/// to `on_error`. Six arguments stay in their registers; the others are pushed again. Each is read
/// at the same offset, because the stack grows by one word with each push.
#[macro_export]
macro_rules! watch {
    ($name:ident, $slots:path, $index:literal, $arguments:literal, $on_error:path) => {
        $crate::naked! {
            #[unsafe(no_mangle)]
            $name:
            ".cfi_startproc",
            // Aligns the stack for the call: the return address, the padding and the arguments are
            // an even number of words.
            "sub rsp, {padding}",
            ".cfi_adjust_cfa_offset {padding}",
            ".rept {words}",
            "push qword ptr [rsp + {padding} + 8 * {words}]",
            ".cfi_adjust_cfa_offset 8",
            ".endr",
            "mov r11d, {index}",
            "call qword ptr [rip + {slots} + {offset}]",
            "add rsp, {padding} + 8 * {words}",
            ".cfi_def_cfa_offset 8",
            "test eax, eax",
            "jnz 2f",
            "ret",
            "2:",
            "mov edi, eax",
            "jmp {on_error}",
            ".cfi_endproc",
            words = const ($arguments as usize).saturating_sub(6),
            padding = const 8 * (1 - ($arguments as usize).saturating_sub(6) % 2),
            index = const $index,
            offset = const $index * 8,
            slots = sym $slots,
            on_error = sym $on_error,
        }
    };
}

/// Defines the target of every slot's first call, with the index in r11: calls `resolve` and jumps
/// to the result. Preserves the argument registers and the caller's stack; 8 + 16 pushes and spills
/// keep it aligned.
#[macro_export]
macro_rules! at_first_call {
    ($name:ident, $resolve:ident) => {
        $crate::naked! {
            $name:
            "push rbp",
            "mov rbp, rsp",
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "push r8",
            "push r9",
            "push rax",
            "push r10",
            "sub rsp, 128",
            "movups [rsp], xmm0",
            "movups [rsp + 16], xmm1",
            "movups [rsp + 32], xmm2",
            "movups [rsp + 48], xmm3",
            "movups [rsp + 64], xmm4",
            "movups [rsp + 80], xmm5",
            "movups [rsp + 96], xmm6",
            "movups [rsp + 112], xmm7",
            "mov edi, r11d",
            "call {resolve}",
            "mov r11, rax",
            "movups xmm0, [rsp]",
            "movups xmm1, [rsp + 16]",
            "movups xmm2, [rsp + 32]",
            "movups xmm3, [rsp + 48]",
            "movups xmm4, [rsp + 64]",
            "movups xmm5, [rsp + 80]",
            "movups xmm6, [rsp + 96]",
            "movups xmm7, [rsp + 112]",
            "add rsp, 128",
            "pop r10",
            "pop rax",
            "pop r9",
            "pop r8",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "pop rbp",
            "jmp r11",
            resolve = sym $resolve,
        }
    };
}
