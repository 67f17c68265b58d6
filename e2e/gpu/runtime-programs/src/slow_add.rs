//! A kernel that takes 20 ms, so that work which does not wait for it has a wrong result.
#![allow(
    unsafe_code,
    reason = "says what its kernel takes, and that its length is the memory's"
)]

use std::error::Error;
use std::ffi::CStr;

use bursar_runtime::DeviceRuntime;
use bursar_runtime::driver::{Access, Grid, Kernel, Parameter};

/// add(uint32_t *to, uint32_t number, uint64_t len): adds to each item, slowly, so that a missing
/// wait shows.
const ADD: &CStr = cr#"
.version 6.0
.target sm_50
.address_size 64
.visible .entry add(.param .u64 p_to, .param .u32 p_number, .param .u64 p_len)
{
	.reg .pred %done;
	.reg .b32 %block, %width, %lane, %number, %item;
	.reg .b64 %to, %len, %me, %from, %now;
	mov.u64 %from, %globaltimer;
WAIT:
	mov.u64 %now, %globaltimer;
	sub.u64 %now, %now, %from;
	setp.lt.u64 %done, %now, 20000000;
	@%done bra WAIT;
	mov.u32 %block, %ctaid.x;
	mov.u32 %width, %ntid.x;
	mov.u32 %lane, %tid.x;
	cvt.u64.u32 %me, %lane;
	mad.wide.u32 %me, %block, %width, %me;
	ld.param.u64 %len, [p_len];
	setp.ge.u64 %done, %me, %len;
	@%done ret;
	ld.param.u64 %to, [p_to];
	cvta.to.global.u64 %to, %to;
	shl.b64 %me, %me, 2;
	add.u64 %to, %to, %me;
	ld.param.u32 %number, [p_number];
	ld.global.u32 %item, [%to];
	add.u32 %item, %item, %number;
	st.global.u32 [%to], %item;
	ret;
}
"#;

/// The items of the memory that the kernel adds to.
pub(crate) const ITEMS: usize = 1 << 12;
pub(crate) const GRID: Grid = Grid::linear(16, 256);

/// Loads the kernel on the GPU of `runtime`.
pub(crate) fn slow_add(runtime: &DeviceRuntime) -> Result<Kernel, Box<dyn Error>> {
    const TAKES: &[Parameter] = &[
        Parameter::Memory(Access::ReadWrite),
        Parameter::Value(4),
        Parameter::Value(8),
    ];
    let function = runtime.context().load(ADD)?.function(c"add")?;
    // SAFETY: the PTX text has these parameters, and every launch here passes the memory's length.
    Ok(unsafe { function.declare(TAKES) })
}
