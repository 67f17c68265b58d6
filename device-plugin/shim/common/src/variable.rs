//! Exports variables of the driver under their names.

/// Exports a variable of the driver that debuggers look for. Its copy stays zero, so no debugger
/// attaches to the driver through it.
#[macro_export]
macro_rules! variable {
    ($name:ident, $size:literal) => {
        #[unsafe(no_mangle)]
        #[unsafe(link_section = ".data")]
        #[allow(non_upper_case_globals)]
        static $name: $crate::Variable<$size> = $crate::Variable::zero();
    };
}

/// Writable bytes for debuggers that look the variable up by name.
#[repr(C, align(8))]
pub struct Variable<const N: usize>(core::cell::UnsafeCell<[u8; N]>);

impl<const N: usize> Variable<N> {
    /// A variable of zeros.
    pub const fn zero() -> Variable<N> {
        Variable(core::cell::UnsafeCell::new([0; N]))
    }
}

// SAFETY: no code here reads or writes it.
unsafe impl<const N: usize> Sync for Variable<N> {}
