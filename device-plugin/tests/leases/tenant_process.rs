//! Runs a tenant's process: this test program once more, which reads commands from its standard
//! input.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bursar_protocol::VERSION;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::messages::retained::{RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{GpuToken, TokenRequest, TokenResponse};
use bursar_protocol::messages::{Account, HEADER, Message, Request, Response};

/// The length of the mark at the start of a lease, which identifies its content.
const MARK: usize = 8;

/// The answer in the name of a process that has ended.
pub(crate) const GONE: &str = "gone";

/// A process in a pod's container.
pub(crate) struct Tenant {
    child: Child,
    channel: BufReader<UnixStream>,
}

/// The result of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    Ready { lease: u64, mark: u64 },
    Write { lease: u64, token: u64 },
}

impl Tenant {
    /// Starts a process that is in no container yet.
    pub(crate) fn spawn() -> Tenant {
        let (own_socket, child_socket) = UnixStream::pair().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["tenant_process::run_tenant_process", "--exact", "--ignored"])
            .stdin(Stdio::from(OwnedFd::from(child_socket)))
            .stdout(Stdio::null());
        let child = command.spawn().unwrap();
        drop(command);
        own_socket
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        Tenant {
            child,
            channel: BufReader::new(own_socket),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command. Returns the answer, or none where the process has ended.
    pub(crate) fn ask(&mut self, line: &str) -> Option<String> {
        writeln!(self.channel.get_mut(), "{line}").ok()?;
        let mut answer = String::new();
        let read = self.channel.read_line(&mut answer).ok()?;
        (read > 0).then(|| answer.trim_end().to_owned())
    }

    /// Opens a lease of its namespace. Fails with the reason.
    pub(crate) fn open(&mut self, name: &str, bytes: u64) -> Result<Opened, String> {
        let answer = self.ask(&format!("open {name} {bytes}")).ok_or(GONE)?;
        let words: Vec<&str> = answer.split(' ').collect();
        let number = |at: usize| words[at].parse().unwrap();
        match words[0] {
            "ready" => Ok(Opened::Ready {
                lease: number(1),
                mark: number(2),
            }),
            "write" => Ok(Opened::Write {
                lease: number(1),
                token: number(2),
            }),
            _ => Err(answer),
        }
    }

    /// Executes a new process image, which has no state.
    pub(crate) fn exec(&mut self) {
        assert_eq!(self.ask("exec").as_deref(), Some("ok"));
    }

    pub(crate) fn commit(&mut self, lease: u64, token: u64, mark: u64) -> String {
        let marked = self.ask(&format!("mark {lease} {mark}"));
        let answer = marked.and_then(|_| self.ask(&format!("commit {lease} {token} {mark}")));
        answer.unwrap_or(GONE.to_owned())
    }

    pub(crate) fn discard(&mut self, lease: u64) -> String {
        let answer = self.ask(&format!("discard {lease}"));
        answer.unwrap_or(GONE.to_owned())
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub(crate) fn kill(mut self) {
        self.kill_and_wait();
    }

    fn kill_and_wait(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.kill_and_wait();
    }
}

#[test]
#[ignore = "is not a test: it is what the tests start"]
fn run_tenant_process() {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let words = UnixStream::from(stdin);
    let mut inside = TenantProcess::default();
    let mut lines = BufReader::new(words.try_clone().unwrap());
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap_or(0) > 0 {
        if line == "exec\n" {
            // The answer precedes the exec, because the next command is for the next process image.
            writeln!(&words, "ok").unwrap();
            let failed = Command::new(std::env::current_exe().unwrap())
                .args(["tenant_process::run_tenant_process", "--exact", "--ignored"])
                .exec();
            panic!("{failed}");
        }
        let answer = inside.answer(line.trim_end());
        line.clear();
        if writeln!(&words, "{answer}").is_err() {
            break;
        }
    }
}

#[derive(Default)]
struct TenantProcess {
    socket: String,
    gpu: String,
    /// A random number for each process image.
    process_image: u64,
    leases: BTreeMap<u64, OwnedFd>,
    session: Option<UnixStream>,
}

impl TenantProcess {
    fn answer(&mut self, line: &str) -> String {
        if self.process_image == 0 {
            self.process_image = rand::random();
        }
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "at" => {
                (self.socket, self.gpu) = (words[1].to_owned(), words[2].to_owned());
                "ok".to_owned()
            }
            "open" => self.open(words[1], number(2)),
            "mark" => {
                let fd = &self.leases[&number(1)];
                let written = rustix::io::pwrite(fd, &number(2).to_le_bytes(), 0);
                assert_eq!(written, Ok(MARK));
                "ok".to_owned()
            }
            "read" => read_mark(&self.leases[&number(1)]).to_string(),
            "commit" => retained_text(self.request_retained(RetainedRequest::Commit {
                version: VERSION,
                lease: number(1),
                token: number(2),
                checksum: number(3),
            })),
            "discard" => {
                self.leases.remove(&number(1));
                retained_text(self.request_retained(RetainedRequest::Discard {
                    version: VERSION,
                    lease: number(1),
                }))
            }
            // A shim sends the same messages.
            "hello" => {
                let hello = Request::Hello {
                    version: VERSION,
                    image: self.process_image,
                    holdings: Vec::new(),
                };
                match self.request(&hello) {
                    Ok((stream, Response::Welcome { .. }, _)) => {
                        self.session = Some(stream);
                        "welcome".to_owned()
                    }
                    other => format!("{other:?}"),
                }
            }
            "seal" => self.request_token(TokenRequest::Seal {
                version: VERSION,
                account: Account::Device(self.gpu.clone()),
                lease: number(1),
                block: number(2),
            }),
            "redeem" => self.request_token(TokenRequest::Redeem {
                version: VERSION,
                token: token_from_hex(words[1]),
            }),
            // Sends a token of this length, which exceeds the limit.
            "babble" => {
                let longest = TokenRequest::Redeem {
                    version: VERSION,
                    token: token_from_hex(""),
                };
                let mut bytes = Request::Token(longest).payload();
                bytes.truncate(bytes.len() - 2);
                bytes.extend(u16::try_from(number(1)).unwrap().to_le_bytes());
                bytes.resize(bytes.len() + number(1) as usize, 0);
                let mut frame = u16::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
                assert_eq!(frame.len(), HEADER);
                frame.extend(bytes);
                let mut stream = UnixStream::connect(&self.socket).unwrap();
                stream.write_all(&frame).unwrap();
                match stream.read(&mut [0]) {
                    Ok(0) => "hung up".to_owned(),
                    other => format!("{other:?}"),
                }
            }
            // Starts a process in no container that holds the descriptor.
            "park" => {
                let kept = rustix::io::dup(&self.leases[&number(1)]).unwrap();
                #[expect(
                    clippy::zombie_processes,
                    reason = "it outlives this process; the test ends it"
                )]
                let holder = Command::new("sleep").arg("1000").spawn().unwrap();
                drop(kept);
                holder.id().to_string()
            }
            // Leaves the descriptor in the queue of a socket that no process reads.
            "queue" => {
                let (own_socket, child_socket) = UnixStream::pair().unwrap();
                let kept = self.leases[&number(1)].as_fd();
                send_message(&own_socket, &Request::Refresh, Some(kept)).unwrap();
                let mut holder = Command::new("sleep");
                holder
                    .arg("1000")
                    .stdin(Stdio::from(OwnedFd::from(child_socket)));
                #[expect(clippy::zombie_processes, reason = "as above")]
                let holder = holder.spawn().unwrap();
                holder.id().to_string()
            }
            // Registers the descriptor with an io_uring, so that no descriptor table lists it.
            "ring" => {
                let kept = rustix::io::dup(&self.leases[&number(1)]).unwrap();
                let mut holder = Command::new(words[2]);
                holder.stdin(Stdio::from(kept)).stdout(Stdio::piped());
                #[expect(clippy::zombie_processes, reason = "as above")]
                let mut holder = holder.spawn().unwrap();
                let mut line = String::new();
                let mut output = BufReader::new(holder.stdout.take().unwrap());
                output.read_line(&mut line).unwrap();
                format!("{} {}", line.trim_end(), holder.id())
            }
            other => panic!("{other}"),
        }
    }

    fn open(&mut self, name: &str, bytes: u64) -> String {
        let request = RetainedRequest::Open {
            version: VERSION,
            image: self.process_image,
            account: Account::Device(self.gpu.clone()),
            name: name.to_owned().try_into().unwrap(),
            key: [1; 32],
            bytes,
        };
        match self.request_retained(request) {
            Ok((
                RetainedResponse::Ready {
                    lease, checksum, ..
                },
                Some(fd),
            )) => {
                let mark = read_mark(&fd);
                assert_eq!(mark, checksum, "what was committed is what is read");
                self.leases.insert(lease, fd);
                format!("ready {lease} {mark}")
            }
            Ok((RetainedResponse::Write { lease, token, .. }, Some(fd))) => {
                self.leases.insert(lease, fd);
                format!("write {lease} {token}")
            }
            other => retained_text(other),
        }
    }

    fn request_token(&self, request: TokenRequest) -> String {
        match self.request(&Request::Token(request)) {
            Ok((_, Response::Token(TokenResponse::Sealed(token)), _)) => {
                let hex = token.as_bytes().iter().map(|byte| format!("{byte:02x}"));
                format!("token {}", hex.collect::<String>())
            }
            Ok((_, Response::Token(TokenResponse::Redeemed(id)), _)) => {
                format!("good {} {}", id.generations.lease, id.block)
            }
            Ok((_, Response::Token(TokenResponse::Refused(why)), _)) => format!("refused {why:?}"),
            Ok((_, other, _)) => format!("{other:?}"),
            Err(error) => format!("away: {error}"),
        }
    }

    /// Sends a message on a new connection and returns the answer.
    fn request(
        &self,
        message: &Request,
    ) -> std::io::Result<(UnixStream, Response, Option<OwnedFd>)> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        send_message(&stream, message, None)?;
        let (answer, fd) = receive_message(&stream)?;
        Ok((stream, answer, fd))
    }

    fn request_retained(
        &self,
        request: RetainedRequest,
    ) -> Result<(RetainedResponse, Option<OwnedFd>), String> {
        match self.request(&Request::Retained(request)) {
            Ok((_, Response::Retained(answer), fd)) => Ok((answer, fd)),
            Ok((_, other, _)) => Err(format!("{other:?}")),
            Err(error) => Err(format!("away: {error}")),
        }
    }
}

fn token_from_hex(text: &str) -> GpuToken {
    let positions = (0..text.len()).step_by(2);
    let bytes = positions.map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap());
    GpuToken::try_from(bytes.collect::<Vec<u8>>()).unwrap()
}

/// Reads the mark. The simulated driver's memory is a file.
fn read_mark(fd: &OwnedFd) -> u64 {
    let mut mark = [0; MARK];
    assert_eq!(rustix::io::pread(fd, &mut mark, 0), Ok(MARK));
    u64::from_le_bytes(mark)
}

fn retained_text(answer: Result<(RetainedResponse, Option<OwnedFd>), String>) -> String {
    match answer {
        Ok((RetainedResponse::Committed, _)) => "committed".to_owned(),
        Ok((RetainedResponse::Discarded, _)) => "discarded".to_owned(),
        Ok((RetainedResponse::Refused(why), _)) => format!("refused {why:?}"),
        Ok((other, _)) => format!("{other:?}"),
        Err(why) => why,
    }
}
