//! Asks the plugin relay whether it answers, continues a stopped one, and ends one that hangs.
//!
//! The kubelet waits for the relay without a deadline when it admits a pod, and admits no other pod
//! of the node meanwhile. A relay that a signal has stopped runs on after SIGCONT, and no pod has
//! failed. SIGKILL costs the pods whose admission waits, so the relay's own watchdog and SIGCONT
//! come first.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use bursar_kubelet::api::deviceplugin::{Empty, KUBELET_SOCKET};
use bursar_kubelet::connect::connect;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;
use tokio::sync::watch;
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

/// Asks the relay in `dir` for ever, and reports in `silent` whether it leaves a question
/// unanswered. Calls `count` for each time that it falls silent.
pub(crate) async fn run(dir: PathBuf, pace: Pace, silent: watch::Sender<bool>, count: impl Fn()) {
    let socket = dir.join(KUBELET_SOCKET);
    let mut unanswered = 0;
    loop {
        // A relay that is away is not silent: its registration says that it is away.
        let is_answered = tokio::time::timeout(pace.interval, ask(&socket))
            .await
            .is_ok();
        if is_answered {
            if unanswered > 0 {
                info!("the plugin relay answers again");
            }
            unanswered = 0;
        } else {
            if unanswered == 0 {
                count();
            }
            unanswered += 1;
            let (signal, name) = match unanswered < pace.most {
                true => (Signal::CONT, "SIGCONT"),
                false => (Signal::KILL, "SIGKILL"),
            };
            match tokio::time::timeout(pace.interval, send(&socket, signal)).await {
                Ok(Ok(pid)) => warn!(
                    pid = pid.as_raw_nonzero(),
                    unanswered, "the plugin relay does not answer: sent it {name}"
                ),
                Ok(Err(error)) => {
                    warn!(unanswered, %error, "the plugin relay does not answer: failed to send it {name}");
                }
                Err(_) => warn!(
                    unanswered,
                    "the plugin relay does not answer, nor its socket"
                ),
            }
        }
        silent.send_if_modified(|silent| {
            let before = std::mem::replace(silent, unanswered > 0);
            before != *silent
        });
        tokio::time::sleep(pace.interval).await;
    }
}

/// Asks the relay for its options, as the kubelet does. Each relay answers, if only that it does
/// not know the question here.
async fn ask(socket: &Path) {
    // `connect` fails at once where nobody listens.
    if let Ok(channel) = connect(socket, PACE.interval).await {
        let options = DevicePluginClient::new(channel);
        let _ = { options }.get_device_plugin_options(Empty {}).await;
    }
}

/// Sends a signal to the process that listens at `socket`, and returns its pid.
async fn send(socket: &Path, signal: Signal) -> io::Result<Pid> {
    let pid = listener(socket).await?;
    let pinned = pidfd_open(pid, PidfdFlags::empty())?;
    // The pid was the relay's when it was pinned if the relay still listens.
    if listener(socket).await? != pid {
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    pidfd_send_signal(pinned, signal)?;
    Ok(pid)
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
        let probe = run(dir.to_owned(), FAST, silent, || {});
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
    async fn signal_reaches_nobody_where_nobody_listens() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join(KUBELET_SOCKET);
        assert!(send(&socket, Signal::CONT).await.is_err());
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        assert!(send(&socket, Signal::CONT).await.is_err());
    }
}
