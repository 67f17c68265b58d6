//! Launches a kernel over typed memory. A launch with other arguments than declared is refused.
#![allow(unsafe_code, reason = "states the parameters of the kernel")]

use std::error::Error;
use std::ffi::CStr;

use bursar_runtime::driver::Parameter::{Memory, Value};
use bursar_runtime::driver::{Access, Grid, Parameter};
use bursar_runtime::{DeviceRuntime, Launch, Tag, TrackedSlice};

/// fill(uint8_t *to, uint8_t value, size_t len), for a grid of one thread.
const FILL: &CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry fill(.param .u64 p_to, .param .u8 p_value, .param .u64 p_len) {
    .reg .pred %done; .reg .b32 %value; .reg .b64 %to, %len, %end;
    ld.param.u64 %to, [p_to]; ld.param.u8 %value, [p_value]; ld.param.u64 %len, [p_len];
    cvta.to.global.u64 %to, %to; add.u64 %end, %to, %len;
NEXT:
    setp.ge.u64 %done, %to, %end; @%done ret;
    st.global.u8 [%to], %value; add.u64 %to, %to, 1; bra NEXT;
}";
/// Parameters of `fill`; a value has its size in bytes.
const TAKES: &[Parameter] = &[Memory(Access::Write), Value(1), Value(8)];

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let stream = runtime.streams().next()?;
    let function = runtime.context().load(FILL)?.function(c"fill")?;
    // SAFETY: the PTX has these parameters, and writes only the memory that it is passed.
    let fill = unsafe { function.declare(TAKES) };
    let mut memory = TrackedSlice::<u8>::allocate(&runtime, 1024, &stream, Tag("filled"))?;
    let len = memory.bytes();
    // One block of one thread.
    Launch::new(&fill, &stream, Grid::linear(1, 1))
        .arg(memory.arg_mut())
        .arg(7_u8)
        .arg(len)
        .submit()?;
    let mut items = [0; 1024];
    memory.copy_to_host(&mut items)?;
    assert_eq!(items, [7; 1024]);
    Ok(())
}
