//! Launches a kernel that writes one byte past a block's end.

use std::alloc::Layout;

use anyhow::{Result, bail};
use bursar_runtime::driver::{Context, Grid, Stream};
use bursar_runtime::{DebugGuard, DeviceMemoryResource, Direct, Exportable, FreeError, Tag};
use serde_json::json;

/// Multiple of the driver's allocation step, so that the byte behind the block is in no allocation.
const BYTES: usize = 4 << 20;

/// `fill(uint8_t *to, uint8_t value, uint64_t len)`, one byte for each thread.
const FILL: &std::ffi::CStr = c".version 6.0
.target sm_50
.address_size 64
.visible .entry fill(.param .u64 p_to, .param .u8 p_value, .param .u64 p_len)
{
    .reg .pred %done;
    .reg .b16 %value;
    .reg .b32 %block, %width, %lane;
    .reg .b64 %to, %len, %me;
    ld.param.u64 %to, [p_to];
    ld.param.u8 %value, [p_value];
    ld.param.u64 %len, [p_len];
    cvta.to.global.u64 %to, %to;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %lane, %tid.x;
    cvt.u64.u32 %me, %lane;
    mad.wide.u32 %me, %block, %width, %me;
    setp.ge.u64 %done, %me, %len;
    @%done ret;
    add.u64 %to, %to, %me;
    st.global.u8 [%to], %value;
    ret;
}";

/// Fills a block and one byte more. compute-sanitizer finds `direct` and `guarded`, which also
/// fault if the address is unmapped; the debug guard finds `canary` when the block is freed.
pub(crate) fn run(context: &Context, how: &str) -> Result<bool> {
    let stream = context.stream()?;
    match how {
        "direct" => planted(context, &stream, &Direct::new(context)),
        "guarded" => planted(context, &stream, &Exportable::guarded(context, 4)?),
        "canary" => planted(context, &stream, &DebugGuard::new(Direct::new(context), 0)),
        _ => bail!("planted direct|guarded|canary"),
    }
}

fn planted<R: DeviceMemoryResource>(
    context: &Context,
    stream: &Stream,
    resource: &R,
) -> Result<bool> {
    let block = resource.allocate(Layout::from_size_align(BYTES, 256)?, stream, Tag("planted"))?;
    let fill = context.load(FILL)?.function(c"fill")?;
    let (mut to, mut value, mut len) = (block.address(), 0x5a_u8, BYTES as u64 + 1);
    let arguments = &mut [
        (&raw mut to).cast(),
        (&raw mut value).cast(),
        (&raw mut len).cast(),
    ];
    let grid = Grid::linear(len.div_ceil(256) as u32, 256);
    // SAFETY: the arguments have the kernel's types, and the kernel writes no host memory. The
    // overrun is intended.
    unsafe { fill.launch(stream, grid, arguments) }?;
    let fault = stream.synchronize().err();
    let refused = match resource.deallocate(block, stream) {
        Err(FreeError::Refused { reason, .. }) => Some(reason.reason()),
        _ => None,
    };
    let code = fault.map(|error| error.code);
    println!(
        "{}",
        json!({"row": "planted", "resource": resource.kind(), "fault": code, "refused": refused})
    );
    Ok(fault.is_some() || refused.is_some())
}
