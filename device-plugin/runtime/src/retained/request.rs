//! Asks the agent about kept memory.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use bursar_protocol::VERSION;
use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, Key, LeaseName};
use bursar_protocol::wire::{Reason, ToAgent, ToShim};

use super::KeptError;
use super::process_image::image;
use crate::agent_client::{Agent, by_name};
use crate::driver::GpuUuid;

/// Asks for a lease of a GPU. What is made is handed to `map` while the agent still makes sure that it will be kept:
/// what that comes to is to be used only with an answer.
pub(super) fn open<M>(
    agent: &Agent,
    gpu: GpuUuid,
    name: &LeaseName,
    key: &Key,
    bytes: u64,
    map: impl Fn(OwnedFd, u64) -> M,
) -> Result<(KeptAnswer, Option<OwnedFd>, Option<M>), KeptError> {
    let open = |account| {
        let stream = agent.say(&ToAgent::Kept(KeptQuestion::Open {
            version: VERSION,
            image: image(),
            account,
            name: name.clone(),
            key: *key,
            bytes,
        }))?;
        match hear(agent, &stream)? {
            (KeptAnswer::Made { bytes }, Some(fd)) => {
                let mapped = map(fd, bytes);
                let (answer, fd) = hear(agent, &stream)?;
                Ok((answer, fd, Some(mapped)))
            }
            (answer, fd) => Ok((answer, fd, None)),
        }
    };
    by_name(gpu, open, |error| {
        matches!(error, KeptError::Goodbye(Reason::Account))
    })
}

/// Asks what is answered in one message without a descriptor.
pub(super) fn ask(agent: &Agent, question: KeptQuestion) -> Result<KeptAnswer, KeptError> {
    let stream = agent.say(&ToAgent::Kept(question))?;
    Ok(hear(agent, &stream)?.0)
}

fn hear(agent: &Agent, stream: &UnixStream) -> Result<(KeptAnswer, Option<OwnedFd>), KeptError> {
    match agent.hear(stream)? {
        (ToShim::Kept(answer), fd) => Ok((answer, fd)),
        _ => Err(KeptError::Unexpected),
    }
}
