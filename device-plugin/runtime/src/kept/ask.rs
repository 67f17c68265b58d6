//! Asks the agent about kept memory: one connection for each question, every wait bounded.

use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use bursar_protocol::dial::dial_at;
use bursar_protocol::socket::{receive_message, send_message};
use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, Key, LeaseName};
use bursar_protocol::wire::{Account, Reason, ToAgent, ToShim};
use bursar_protocol::{CONTAINER_RUN_DIR, SOCKET_NAME, VERSION};

use super::KeptError;
use crate::driver::GpuUuid;

/// How long an answer may take. The driver makes 64 GiB in a fifth of a second at worst (design F6), and a worker that
/// hangs is replaced meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);

/// An agent.
#[derive(Debug)]
pub(super) struct Agent {
    socket: PathBuf,
}

impl Agent {
    pub(super) fn of_this_container() -> Agent {
        Agent::at(&Path::new(CONTAINER_RUN_DIR).join(SOCKET_NAME))
    }

    pub(super) fn at(socket: &Path) -> Agent {
        Agent {
            socket: socket.to_owned(),
        }
    }

    /// Where it listens.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks for a lease of a GPU. What is made is handed to `map` while the agent still makes sure that it will be
    /// kept: what that comes to is to be used only with an answer. The driver does not say whether a UUID is a MIG
    /// instance's, and the agent has an account of one of both names.
    pub(super) fn open<M>(
        &self,
        gpu: GpuUuid,
        name: &LeaseName,
        key: &Key,
        bytes: u64,
        map: impl Fn(OwnedFd, u64) -> M,
    ) -> Result<(KeptAnswer, Option<OwnedFd>, Option<M>), KeptError> {
        let named = |uuid: String| {
            let stream = self.say(KeptQuestion::Open {
                version: VERSION,
                image: image(),
                account: Account::Device(uuid),
                name: name.clone(),
                key: *key,
                bytes,
            })?;
            match self.hear(&stream)? {
                (KeptAnswer::Made { bytes }, Some(fd)) => {
                    let mapped = map(fd, bytes);
                    let (answer, fd) = self.hear(&stream)?;
                    Ok((answer, fd, Some(mapped)))
                }
                (answer, fd) => Ok((answer, fd, None)),
            }
        };
        match named(gpu.to_string()) {
            Err(KeptError::Goodbye(Reason::Account)) => {
                named(gpu.to_string().replacen("GPU-", "MIG-", 1))
            }
            done => done,
        }
    }

    /// Asks what is answered in one message without a descriptor.
    pub(super) fn ask(&self, question: KeptQuestion) -> Result<KeptAnswer, KeptError> {
        let stream = self.say(question)?;
        Ok(self.hear(&stream)?.0)
    }

    fn say(&self, question: KeptQuestion) -> Result<UnixStream, KeptError> {
        let failed = |source| self.failed(source);
        let stream = dial_at(&self.socket, PATIENCE).map_err(failed)?;
        send_message(&stream, &ToAgent::Kept(question), None).map_err(failed)?;
        Ok(stream)
    }

    fn hear(&self, stream: &UnixStream) -> Result<(KeptAnswer, Option<OwnedFd>), KeptError> {
        match receive_message(stream).map_err(|source| self.failed(source))? {
            (ToShim::Kept(answer), fd) => Ok((answer, fd)),
            (ToShim::Goodbye { reason }, _) => Err(KeptError::Goodbye(reason)),
            _ => Err(KeptError::Unexpected),
        }
    }

    fn failed(&self, source: std::io::Error) -> KeptError {
        KeptError::Agent {
            path: self.socket.display().to_string(),
            source,
        }
    }
}

/// Tells this process image from one before an exec: drawn once.
fn image() -> u64 {
    static IMAGE: OnceLock<u64> = OnceLock::new();
    *IMAGE.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}
