//! Asks the plugin relay whether it answers, continues a stopped one, and ends one that hangs.
//!
//! The kubelet waits for the relay without a deadline when it admits a pod, and admits no other pod
//! of the node meanwhile. A relay that a signal has stopped runs on after SIGCONT, and no pod has
//! failed. SIGKILL costs the pods whose admission waits, so the relay's own watchdog and SIGCONT
//! come first.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_host::procfs;
use bursar_kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use bursar_kubelet::api::deviceplugin::{Empty, KUBELET_SOCKET};
use bursar_kubelet::connect::connect;
use rustix::process::{Pid, Signal, pidfd_send_signal};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

/// The pace of the questions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The time for an answer, and the pause before the next question.
    pub(crate) interval: Duration,
    /// The unanswered questions in a row after which the agent ends the relay.
    pub(crate) most: u32,
}

/// Continues a stopped relay within 10 s, and ends it within 20 s. The agent counts questions, so
/// that a machine that was suspended for longer has another one.
pub(crate) const PACE: Pace = Pace {
    interval: Duration::from_secs(5),
    most: 2,
};

/// The outcome of a question.
enum Heard {
    /// The relay runs.
    Answer,
    /// No process listens at the socket: the relay is away, as its registration says.
    NoListener,
    /// The process that listens does not answer.
    Silence(Pid),
    /// The agent could not ask.
    Unknown,
}

/// Asks the relay in `dir` for ever, and reports in `silent` whether it leaves a question
/// unanswered. Calls `count` for each time that it falls silent. `program` is the relay's name.
pub(crate) async fn run(
    dir: PathBuf,
    program: &str,
    pace: Pace,
    silent: watch::Sender<bool>,
    count: impl Fn(),
) {
    let socket = dir.join(KUBELET_SOCKET);
    let mut unanswered: Option<(Pid, u32)> = None;
    loop {
        match ask(&socket, pace.interval).await {
            Heard::Unknown => {}
            Heard::NoListener => unanswered = None,
            Heard::Answer => {
                if unanswered.take().is_some() {
                    info!("the plugin relay answers again");
                }
            }
            Heard::Silence(pid) => {
                if unanswered.is_none() {
                    count();
                }
                let same = unanswered.filter(|(before, _)| *before == pid);
                let questions = same.map_or(1, |(_, questions)| questions + 1);
                unanswered = Some((pid, questions));
                let (signal, name) = match questions < pace.most {
                    true => (Signal::CONT, "SIGCONT"),
                    false => (Signal::KILL, "SIGKILL"),
                };
                match send(&socket, pid, program, signal).await {
                    Ok(()) => warn!(
                        %pid,
                        questions, "the plugin relay does not answer: sent it {name}"
                    ),
                    Err(error) => warn!(
                        %pid,
                        questions,
                        %error,
                        "the plugin relay does not answer: failed to send it {name}"
                    ),
                }
            }
        }
        silent.send_if_modified(|silent| {
            let before = std::mem::replace(silent, unanswered.is_some());
            before != *silent
        });
        tokio::time::sleep(pace.interval).await;
    }
}

/// Asks the relay for its options, as the kubelet does. A relay that runs replies, if only that it
/// does not know the question here, or closes the connection.
async fn ask(socket: &Path, limit: Duration) -> Heard {
    let asked = Instant::now();
    let pid = match listener(socket).await {
        Ok(pid) => pid,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Heard::NoListener,
                _ => Heard::Unknown,
            };
        }
    };
    let question = async {
        let channel = connect(socket, limit).await.ok()?;
        let options = DevicePluginClient::new(channel);
        let _ = { options }.get_device_plugin_options(Empty {}).await;
        Some(())
    };
    match tokio::time::timeout(limit, question).await {
        Ok(Some(())) => Heard::Answer,
        Ok(None) => Heard::Unknown,
        // The agent did not run itself.
        Err(_) if asked.elapsed() > 2 * limit => Heard::Unknown,
        Err(_) => Heard::Silence(pid),
    }
}

/// Sends a signal to the process `pid` if it runs `program` and listens at `socket`.
async fn send(socket: &Path, pid: Pid, program: &str, signal: Signal) -> io::Result<()> {
    let pinned = procfs::pin_named(pid, program)?;
    // The pid was the listener's when it was pinned if it is so still.
    if listener(socket).await? != pid {
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    Ok(pidfd_send_signal(pinned, signal)?)
}

/// The process that listens at `socket`. A stopped process accepts connections, too.
async fn listener(socket: &Path) -> io::Result<Pid> {
    let stream = UnixStream::connect(socket).await?;
    let pid = stream.peer_cred()?.pid().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::other("its process is in no pid namespace of the agent"))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command, Stdio};

    use rustix::process::kill_process;
    use tokio::task::JoinHandle;

    use super::*;

    /// A relay that listens and never answers, although it runs.
    const MUTE: &str = "
import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(64)
print('listens', flush=True)
while True: time.sleep(60)";

    /// A relay that answers each connection by closing it.
    const CLOSES: &str = "
import socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(64)
print('listens', flush=True)
while True: s.accept()[0].close()";

    const FAST: Pace = Pace {
        interval: Duration::from_secs(1),
        most: 2,
    };

    fn start_relay(dir: &Path, program: &str) -> Child {
        let mut relay = Command::new("python3")
            .args(["-c", program])
            .arg(dir.join(KUBELET_SOCKET))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = relay.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "listens\n");
        relay
    }

    fn start_probe(dir: &Path) -> (watch::Receiver<bool>, JoinHandle<()>) {
        let (silent, is_silent) = watch::channel(false);
        let probe = run(dir.to_owned(), "python3", FAST, silent, || {});
        (is_silent, tokio::spawn(probe))
    }

    async fn until(is_silent: &mut watch::Receiver<bool>, wanted: bool) {
        let changed = is_silent.wait_for(|silent| *silent == wanted);
        let changed = tokio::time::timeout(Duration::from_secs(60), changed).await;
        changed.unwrap().unwrap();
    }

    #[tokio::test]
    async fn stopped_relay_is_told_and_continued() {
        let dir = tempfile::tempdir().unwrap();
        let mut relay = start_relay(dir.path(), CLOSES);
        kill_process(Pid::from_child(&relay), Signal::STOP).unwrap();
        let (mut is_silent, probe) = start_probe(dir.path());
        until(&mut is_silent, true).await;
        until(&mut is_silent, false).await;
        assert!(relay.try_wait().unwrap().is_none(), "it runs on");
        probe.abort();
        relay.kill().unwrap();
        relay.wait().unwrap();
    }

    #[tokio::test]
    async fn relay_that_hangs_is_told_and_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut relay = start_relay(dir.path(), MUTE);
        let (mut is_silent, probe) = start_probe(dir.path());
        until(&mut is_silent, true).await;
        let ended = tokio::task::spawn_blocking(move || relay.wait().unwrap());
        assert_eq!(ended.await.unwrap().signal(), Some(Signal::KILL.as_raw()));
        // Its socket is left, and nobody listens: the relay is away, and not silent.
        until(&mut is_silent, false).await;
        probe.abort();
    }

    #[tokio::test]
    async fn signal_reaches_only_the_relay_that_listens() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join(KUBELET_SOCKET);
        let limit = Duration::from_secs(5);
        assert!(matches!(ask(&socket, limit).await, Heard::NoListener));
        let mut relay = start_relay(dir.path(), MUTE);
        let pid = Pid::from_child(&relay);
        let other = send(&socket, pid, "bursar-relay", Signal::KILL).await;
        let text = other.unwrap_err().to_string();
        assert!(text.contains("python3 is not bursar-relay"), "{text}");
        let mut another = Command::new("python3")
            .args(["-c", "input()"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&another);
        assert!(send(&socket, pid, "python3", Signal::KILL).await.is_err());
        for child in [&mut relay, &mut another] {
            assert!(child.try_wait().unwrap().is_none(), "it lives");
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(matches!(ask(&socket, limit).await, Heard::NoListener));
    }
}
