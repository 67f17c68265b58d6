//! Passes the identity of memory to other programs by a token that the node's agent signs.
//!
//! `tokens PUBLIC-KEY`, in a container of Bursar, with `status.tokenKey.publicKey` of the node's
//! GpuNode.

use std::error::Error;

use bursar_runtime::memory::gpu_token::{MemoryId, NodePublicKey, verify};
use bursar_runtime::{DeviceRuntime, GpuToken, TokenClient};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let key = std::env::args().nth(1).ok_or("usage: tokens PUBLIC-KEY")?;
    let memory = exchange(&TokenClient::in_container(), &key.parse()?)?;
    println!("{memory:?}");
    Ok(())
}

pub(crate) fn exchange(
    tokens: &TokenClient,
    key: &NodePublicKey,
) -> Result<MemoryId, Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    // The number names the memory for this program: an index, or an offset.
    let sealed = tokens.seal_allocation(runtime.uuid(), 3)?;
    let message: Vec<u8> = sealed.as_bytes().to_vec(); // by any channel
    let received = GpuToken::try_from(message)?;
    // Anywhere, without an agent or a GPU: what was true when the token was sealed.
    let verified = verify(&received, key)?;
    assert_eq!(verified.gpu, runtime.uuid().to_string());
    // On the same node, before each use: the agent knows whether the memory still exists.
    let memory = tokens.redeem(&received)?;
    assert_eq!(memory, verified);
    Ok(memory)
}
