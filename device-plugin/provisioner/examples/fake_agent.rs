//! Replaces the agent where there is no cluster: `fake_agent SOCKET FDSTORE-FOLDER PROVISIONER
//! GPU...`.
//!
//! Answers lease requests with the real fd store and real provisioners, for any process of the
//! machine: there are no containers, quotas or namespaces. As with the agent, a writer that exits
//! before its commit loses its lease. The key that signs its memory tokens is known to the tests.
//! For tests of the clients and for measurements; no image contains it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bursar_protocol::connect::connect_to;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::fdstore::{self, Blob, FdStoreRequest, FdStoreResponse};
use bursar_protocol::messages::retained::{
    Key, LeaseName, RetainedRefusal, RetainedRequest, RetainedResponse,
};
use bursar_protocol::messages::signed_token::{NodePublicKey, SignedToken, UnsignedToken};
use bursar_protocol::messages::token::{
    Generations, GpuToken, MemoryId, TokenRefusal, TokenRequest, TokenResponse,
};
use bursar_protocol::messages::{Account, RejectReason, Request, Response};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use rustix::net::sockopt::socket_peercred;

const TIMEOUT: Duration = Duration::from_secs(10);
const EXPIRES_MS: u64 = 60_000;

struct Provisioner {
    socket: UnixStream,
    _process: Child,
}

impl Provisioner {
    fn start(program: &Path, gpu: &str) -> anyhow::Result<Provisioner> {
        let (socket, child_socket) = UnixStream::pair()?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let process = Command::new(program)
            .args(["--gpu", gpu])
            .env("CUDA_VISIBLE_DEVICES", gpu)
            .stdin(Stdio::from(OwnedFd::from(child_socket)))
            .spawn()
            .with_context(|| format!("failed to start {}", program.display()))?;
        match receive_message(&socket)?.0 {
            ProvisionerResponse::Ready { .. } => Ok(Provisioner {
                socket,
                _process: process,
            }),
            other => bail!("failed to start the provisioner of {gpu}: {other:?}"),
        }
    }

    fn create(&self, bytes: u64) -> io::Result<Result<(u64, OwnedFd), RetainedRefusal>> {
        let lendable = u64::MAX;
        let request = ProvisionerRequest::Create { bytes, lendable };
        send_message(&self.socket, &request, None)?;
        Ok(match receive_message(&self.socket)? {
            (ProvisionerResponse::Created { bytes }, Some(fd)) => Ok((bytes, fd)),
            (ProvisionerResponse::Failed { code, .. }, _) => Err(RetainedRefusal::Driver { code }),
            _ => Err(RetainedRefusal::Unavailable),
        })
    }
}

struct FdStore {
    socket: UnixStream,
    /// Whether the fd store's answer to a put was not received yet.
    has_sent_put: bool,
}

impl FdStore {
    fn ask(&mut self, message: &FdStoreRequest) -> io::Result<(FdStoreResponse, Option<OwnedFd>)> {
        self.receive_stored()?;
        send_message(&self.socket, message, None)?;
        receive_message(&self.socket)
    }

    /// Receives the answer to the last put.
    fn receive_stored(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.has_sent_put) {
            let stored: FdStoreResponse = receive_message(&self.socket)?.0;
            if stored != FdStoreResponse::Stored {
                return Err(io::Error::other(format!("failed to store: {stored:?}")));
            }
        }
        Ok(())
    }

    /// Sends a descriptor. As with the agent, the client does not wait for the answer.
    fn put(&mut self, lease: u64, fd: &OwnedFd) -> io::Result<()> {
        let blob = Blob::default();
        let put = FdStoreRequest::Put { lease, blob };
        self.receive_stored()?;
        self.has_sent_put = true;
        send_message(&self.socket, &put, Some(fd.as_fd()))
    }
}

#[derive(PartialEq, Eq, Hash)]
struct LeaseKey {
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

struct FakeAgent {
    fd_store: FdStore,
    provisioners: HashMap<String, Provisioner>,
    leases: HashMap<LeaseKey, Lease>,
    created: u64,
}

impl FakeAgent {
    fn answer(
        &mut self,
        request: RetainedRequest,
        client: &UnixStream,
    ) -> io::Result<(Response, Option<OwnedFd>)> {
        let answered = match request {
            RetainedRequest::Open {
                account: Account::Device(gpu),
                name,
                key,
                bytes,
                ..
            } if self.provisioners.contains_key(&gpu) => {
                let pid = socket_peercred(client)?.pid.as_raw_nonzero().get();
                return self.open(LeaseKey { gpu, name, key }, bytes, pid);
            }
            RetainedRequest::Open { .. } => {
                let reason = RejectReason::Account;
                return Ok((Response::Rejected { reason }, None));
            }
            RetainedRequest::Commit {
                lease,
                token,
                checksum,
                ..
            } => self.commit(lease, token, checksum),
            RetainedRequest::Discard { lease, .. } => {
                self.leases.retain(|_, held| held.lease != lease);
                self.fd_store.ask(&FdStoreRequest::Drop { lease })?;
                RetainedResponse::Discarded
            }
        };
        Ok((Response::Retained(answered), None))
    }

    fn commit(&mut self, lease: u64, right: u64, checksum: u64) -> RetainedResponse {
        let held = self.leases.values_mut().find(|held| held.lease == lease);
        match held {
            None => RetainedResponse::Refused(RetainedRefusal::Missing),
            Some(held) => match held.state {
                State::Writing { token, .. } if token == right => {
                    held.state = State::Committed { checksum };
                    RetainedResponse::Committed
                }
                _ => RetainedResponse::Refused(RetainedRefusal::Fenced),
            },
        }
    }

    fn open(
        &mut self,
        title: LeaseKey,
        bytes: u64,
        pid: i32,
    ) -> io::Result<(Response, Option<OwnedFd>)> {
        if let Some(held) = self.leases.get_mut(&title) {
            match &mut held.state {
                // As in the agent: the first answer may have been lost.
                State::Writing { pid: writer, token } if *writer == pid && bytes > 0 => {
                    *token = token.wrapping_add(1);
                    let response = write(held.lease, held.bytes, *token);
                    let lease = held.lease;
                    let (_, fd) = self.fd_store.ask(&FdStoreRequest::Get { lease })?;
                    return Ok((response, fd));
                }
                State::Writing { pid, .. } if is_running(*pid) => {
                    return Ok((refused(RetainedRefusal::Writing), None));
                }
                State::Writing { .. } => {
                    let lease = held.lease;
                    self.leases.remove(&title);
                    self.fd_store.ask(&FdStoreRequest::Drop { lease })?;
                }
                State::Committed { checksum } => {
                    let (lease, bytes, checksum) = (held.lease, held.bytes, *checksum);
                    let (_, fd) = self.fd_store.ask(&FdStoreRequest::Get { lease })?;
                    let ready = RetainedResponse::Ready {
                        lease,
                        generation: lease,
                        bytes,
                        checksum,
                    };
                    return Ok((Response::Retained(ready), fd));
                }
            }
        }
        if bytes == 0 {
            return Ok((refused(RetainedRefusal::Missing), None));
        }
        let Some(provisioner) = self.provisioners.get(&title.gpu) else {
            return Ok((refused(RetainedRefusal::Unavailable), None));
        };
        let (bytes, fd) = match provisioner.create(bytes)? {
            Ok(created) => created,
            Err(why) => return Ok((refused(why), None)),
        };
        self.created += 1;
        let (lease, token) = (
            self.created,
            self.created.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        );
        self.fd_store.put(lease, &fd)?;
        let state = State::Writing { pid, token };
        let held = Lease {
            lease,
            bytes,
            state,
        };
        self.leases.insert(title, held);
        Ok((write(lease, bytes, token), Some(fd)))
    }
}

fn write(lease: u64, bytes: u64, token: u64) -> Response {
    Response::Retained(RetainedResponse::Write {
        lease,
        generation: lease,
        bytes,
        token,
        expires_ms: EXPIRES_MS,
    })
}

fn refused(why: RetainedRefusal) -> Response {
    Response::Retained(RetainedResponse::Refused(why))
}

/// The secret half of the key that signs tokens.
const TOKEN_SECRET: [u8; 32] = [1; 32];

/// Seals tokens for any memory, and redeems what it has sealed.
fn answer_token(request: TokenRequest) -> anyhow::Result<TokenResponse> {
    let pair = Ed25519KeyPair::from_seed_unchecked(&TOKEN_SECRET)
        .map_err(|error| anyhow::anyhow!("failed to read the seed: {error}"))?;
    let public = NodePublicKey(pair.public_key().as_ref().try_into()?);
    Ok(match request {
        TokenRequest::Seal {
            account: Account::Device(gpu),
            lease,
            block,
            ..
        } => {
            let id = MemoryId {
                node: "node-1".to_owned(),
                gpu,
                container: 1,
                generations: Generations {
                    gpu: 1,
                    process: 1,
                    lease,
                },
                block,
            };
            let unsigned = UnsignedToken::new(&public, &id);
            let signature = pair.sign(&unsigned.signed_bytes());
            TokenResponse::Sealed(unsigned.with_signature(signature.as_ref())?)
        }
        TokenRequest::Seal { .. } => TokenResponse::Refused(TokenRefusal::NoSession),
        TokenRequest::Redeem { token, .. } => redeem(&token, &public),
    })
}

fn redeem(token: &GpuToken, public: &NodePublicKey) -> TokenResponse {
    let Ok(token) = SignedToken::parse(token) else {
        return TokenResponse::Refused(TokenRefusal::Malformed);
    };
    let key = UnparsedPublicKey::new(&ED25519, public.0);
    match key.verify(&token.signed_bytes(), token.signature()) {
        Ok(()) => TokenResponse::Redeemed(token.id),
        Err(_) => TokenResponse::Refused(TokenRefusal::Forged),
    }
}

/// Whether a process runs; zombies do not.
fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().next());
    !matches!(state, None | Some("Z" | "X"))
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [socket, folder, provisioner, gpus @ ..] = arguments.as_slice() else {
        bail!("usage: fake_agent SOCKET FDSTORE-FOLDER PROVISIONER GPU...");
    };
    let mut fd_store = FdStore {
        socket: connect_to(&Path::new(folder).join(fdstore::SOCKET_NAME), TIMEOUT)?,
        has_sent_put: false,
    };
    let version = fdstore::VERSION;
    let (ready, _) = fd_store.ask(&FdStoreRequest::Hello { version })?;
    ensure!(
        matches!(ready, FdStoreResponse::Ready { leases: 0, .. }),
        "the fd store is not empty: {ready:?}"
    );
    let mut agent = FakeAgent {
        fd_store,
        provisioners: HashMap::new(),
        leases: HashMap::new(),
        created: 0,
    };
    for gpu in gpus {
        let gpu = gpu.to_string_lossy().into_owned();
        let provisioner = Provisioner::start(Path::new(provisioner), &gpu)?;
        // As in the agent: exports are fast while one descriptor is open (F3 in
        // docs/internals/facts.md).
        if let Ok((_, keep_alive)) = provisioner.create(1)? {
            agent.fd_store.put(fdstore::KEEP_ALIVE, &keep_alive)?;
        }
        agent.provisioners.insert(gpu, provisioner);
    }
    let listener = UnixListener::bind(socket)?;
    println!("ready");
    loop {
        let (client, _) = listener.accept()?;
        client.set_read_timeout(Some(TIMEOUT))?;
        let (answer, fd) = match receive_message(&client) {
            Ok((Request::Retained(request), _)) => agent.answer(request, &client)?,
            Ok((Request::Token(request), _)) => (Response::Token(answer_token(request)?), None),
            _ => continue,
        };
        // The client may have hung up.
        let _ = send_message(&client, &answer, fd.as_ref().map(AsFd::as_fd));
    }
}
