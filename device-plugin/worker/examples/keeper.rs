//! Stands in for the agent where there is no cluster: `keeper SOCKET VAULT-FOLDER WORKER GPU...`.
//!
//! Answers what clients ask about kept memory, with the real vault and real workers behind it, for any process of this
//! machine: it knows no containers, quotas or namespaces. A writer that ends before it commits is discarded, as the
//! agent does. For tests of the clients and for measurements; not part of any image.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bursar_protocol::MADE_SINCE;
use bursar_protocol::dial::dial_at;
use bursar_protocol::socket::{receive_message, send_message};
use bursar_protocol::vault::{self, Blob, FromVault, ToVault};
use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, KeptRefusal, Key, LeaseName};
use bursar_protocol::wire::{Account, Reason, ToAgent, ToShim};
use bursar_protocol::worker::{FromWorker, ToWorker};
use rustix::net::sockopt::socket_peercred;

const PATIENCE: Duration = Duration::from_secs(10);
const EXPIRES_MS: u64 = 60_000;

struct Worker {
    socket: UnixStream,
    _process: Child,
}

impl Worker {
    fn start(program: &Path, gpu: &str) -> anyhow::Result<Worker> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let process = Command::new(program)
            .args(["--gpu", gpu])
            .env("CUDA_VISIBLE_DEVICES", gpu)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        match receive_message(&socket)?.0 {
            FromWorker::Ready { .. } => Ok(Worker {
                socket,
                _process: process,
            }),
            other => bail!("the worker of {gpu}: {other:?}"),
        }
    }

    fn create(&self, bytes: u64) -> io::Result<Result<(u64, OwnedFd), KeptRefusal>> {
        send_message(&self.socket, &ToWorker::Create { bytes }, None)?;
        Ok(match receive_message(&self.socket)? {
            (FromWorker::Created { bytes }, Some(fd)) => Ok((bytes, fd)),
            (FromWorker::Failed { code, .. }, _) => Err(KeptRefusal::Driver { code }),
            _ => Err(KeptRefusal::Unavailable),
        })
    }
}

struct Vault(UnixStream);

impl Vault {
    fn ask(
        &self,
        message: &ToVault,
        fd: Option<&OwnedFd>,
    ) -> io::Result<(FromVault, Option<OwnedFd>)> {
        send_message(&self.0, message, fd.map(AsFd::as_fd))?;
        receive_message(&self.0)
    }
}

#[derive(PartialEq, Eq, Hash)]
struct Title {
    gpu: String,
    name: LeaseName,
    key: Key,
}

struct Lease {
    lease: u64,
    bytes: u64,
    state: State,
}

enum State {
    Writing { pid: i32, token: u64 },
    Committed { checksum: u64 },
}

struct Keeper {
    vault: Vault,
    workers: HashMap<String, Worker>,
    leases: HashMap<Title, Lease>,
    made: u64,
}

impl Keeper {
    fn answer(
        &mut self,
        question: KeptQuestion,
        client: &UnixStream,
    ) -> io::Result<(ToShim, Option<OwnedFd>)> {
        let answered = match question {
            KeptQuestion::Open {
                version,
                account: Account::Device(gpu),
                name,
                key,
                bytes,
                ..
            } if self.workers.contains_key(&gpu) => {
                let early = (version >= MADE_SINCE).then_some(client);
                let pid = socket_peercred(client)?.pid.as_raw_nonzero().get();
                return self.open(Title { gpu, name, key }, bytes, pid, early);
            }
            KeptQuestion::Open { .. } => {
                let reason = Reason::Account;
                return Ok((ToShim::Goodbye { reason }, None));
            }
            KeptQuestion::Commit {
                lease,
                token,
                checksum,
                ..
            } => self.commit(lease, token, checksum),
            KeptQuestion::Discard { lease, .. } => {
                self.leases.retain(|_, held| held.lease != lease);
                self.vault.ask(&ToVault::Drop { lease }, None)?;
                KeptAnswer::Discarded
            }
        };
        Ok((ToShim::Kept(answered), None))
    }

    fn commit(&mut self, lease: u64, right: u64, checksum: u64) -> KeptAnswer {
        let held = self.leases.values_mut().find(|held| held.lease == lease);
        match held {
            None => KeptAnswer::Refused(KeptRefusal::Missing),
            Some(held) => match held.state {
                State::Writing { token, .. } if token == right => {
                    held.state = State::Committed { checksum };
                    KeptAnswer::Committed
                }
                _ => KeptAnswer::Refused(KeptRefusal::Fenced),
            },
        }
    }

    fn open(
        &mut self,
        title: Title,
        bytes: u64,
        pid: i32,
        early: Option<&UnixStream>,
    ) -> io::Result<(ToShim, Option<OwnedFd>)> {
        if let Some(held) = self.leases.get_mut(&title) {
            match &mut held.state {
                // As the agent does: an answer may have been lost.
                State::Writing { pid: writer, token } if *writer == pid && bytes > 0 => {
                    *token = token.wrapping_add(1);
                    let given = write(held.lease, held.bytes, *token);
                    let lease = held.lease;
                    let (_, fd) = self.vault.ask(&ToVault::Get { lease }, None)?;
                    return Ok((given, fd));
                }
                State::Writing { pid, .. } if lives(*pid) => {
                    return Ok((refused(KeptRefusal::Writing), None));
                }
                State::Writing { .. } => {
                    let lease = held.lease;
                    self.leases.remove(&title);
                    self.vault.ask(&ToVault::Drop { lease }, None)?;
                }
                State::Committed { checksum } => {
                    let (lease, bytes, checksum) = (held.lease, held.bytes, *checksum);
                    let (_, fd) = self.vault.ask(&ToVault::Get { lease }, None)?;
                    let ready = KeptAnswer::Ready {
                        lease,
                        generation: lease,
                        bytes,
                        checksum,
                    };
                    return Ok((ToShim::Kept(ready), fd));
                }
            }
        }
        if bytes == 0 {
            return Ok((refused(KeptRefusal::Missing), None));
        }
        let Some(worker) = self.workers.get(&title.gpu) else {
            return Ok((refused(KeptRefusal::Unavailable), None));
        };
        let (bytes, fd) = match worker.create(bytes)? {
            Ok(made) => made,
            Err(why) => return Ok((refused(why), None)),
        };
        if let Some(client) = early {
            let made = ToShim::Kept(KeptAnswer::Made { bytes });
            // One that hung up is found to have ended by the next open.
            let _ = send_message(client, &made, Some(fd.as_fd()));
        }
        self.made += 1;
        let (lease, token) = (self.made, self.made.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let blob = Blob::default();
        self.vault.ask(&ToVault::Put { lease, blob }, Some(&fd))?;
        let state = State::Writing { pid, token };
        let held = Lease {
            lease,
            bytes,
            state,
        };
        self.leases.insert(title, held);
        let fd = early.is_none().then_some(fd);
        Ok((write(lease, bytes, token), fd))
    }
}

fn write(lease: u64, bytes: u64, token: u64) -> ToShim {
    ToShim::Kept(KeptAnswer::Write {
        lease,
        generation: lease,
        bytes,
        token,
        expires_ms: EXPIRES_MS,
    })
}

fn refused(why: KeptRefusal) -> ToShim {
    ToShim::Kept(KeptAnswer::Refused(why))
}

/// Whether a process runs: one that only waits to be asked for its end does not.
fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().next());
    !matches!(state, None | Some("Z" | "X"))
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [socket, folder, worker, gpus @ ..] = arguments.as_slice() else {
        bail!("usage: keeper SOCKET VAULT-FOLDER WORKER GPU...");
    };
    let vault = Vault(dial_at(
        &Path::new(folder).join(vault::SOCKET_NAME),
        PATIENCE,
    )?);
    let version = vault::VERSION;
    let (ready, _) = vault.ask(&ToVault::Hello { version }, None)?;
    ensure!(
        matches!(ready, FromVault::Ready { leases: 0, .. }),
        "the vault is not a fresh one: {ready:?}"
    );
    let mut keeper = Keeper {
        vault,
        workers: HashMap::new(),
        leases: HashMap::new(),
        made: 0,
    };
    for gpu in gpus {
        let gpu = gpu.to_string_lossy().into_owned();
        let worker = Worker::start(Path::new(worker), &gpu)?;
        // As the agent does: exports are quick while one is open (design F3).
        if let Ok((_, sentinel)) = worker.create(1)? {
            let (lease, blob) = (vault::SENTINEL, Blob::default());
            keeper
                .vault
                .ask(&ToVault::Put { lease, blob }, Some(&sentinel))?;
        }
        keeper.workers.insert(gpu, worker);
    }
    let listener = UnixListener::bind(socket)?;
    println!("ready");
    loop {
        let (client, _) = listener.accept()?;
        client.set_read_timeout(Some(PATIENCE))?;
        let Ok((ToAgent::Kept(question), _)) = receive_message(&client) else {
            continue;
        };
        let (answer, fd) = keeper.answer(question, &client)?;
        // A client that hung up has no use for it.
        let _ = send_message(&client, &answer, fd.as_ref().map(AsFd::as_fd));
    }
}
