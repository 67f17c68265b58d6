//! Tests the provisioner and the scrub check as processes over the simulated driver.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_driver::driver::{Access, Driver};
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use bursar_sim_lab::{ONE_GPU, SimMachine, TWO_GPUS, run_in_subprocess};

const PROGRAM: &str = env!("CARGO_BIN_EXE_bursar-provisioner");
const FIRST: &str = "GPU-00000000-0000-0000-0000-000000000001";
const SECOND: &str = "GPU-00000000-0000-0000-0000-000000000002";
const MIB: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(20);

/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: i32 = 2;

struct Provisioner {
    process: Child,
    socket: UnixStream,
}

impl Provisioner {
    fn start(mut command: Command, gpu: &str) -> Provisioner {
        let (socket, child_socket) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        command
            .args(["--gpu", gpu])
            .stdin(Stdio::from(OwnedFd::from(child_socket)));
        // The command holds the provisioner's end of the socket until the command is dropped.
        let process = command.spawn().unwrap();
        Provisioner { process, socket }
    }

    fn ready(command: Command, gpu: &str) -> Provisioner {
        let provisioner = Provisioner::start(command, gpu);
        let (response, _) = provisioner.receive();
        assert!(
            matches!(response, ProvisionerResponse::Ready { .. }),
            "{response:?}"
        );
        provisioner
    }

    fn receive(&self) -> (ProvisionerResponse, Option<OwnedFd>) {
        receive_message(&self.socket).unwrap()
    }

    fn ask(&self, message: ProvisionerRequest) -> (ProvisionerResponse, Option<OwnedFd>) {
        send_message(&self.socket, &message, None).unwrap();
        self.receive()
    }

    /// Requests memory of a GPU that may lend all of its memory.
    fn request(&self, bytes: u64) -> (ProvisionerResponse, Option<OwnedFd>) {
        let lendable = u64::MAX;
        self.ask(ProvisionerRequest::Create { bytes, lendable })
    }

    fn create(&self, bytes: u64) -> OwnedFd {
        let (response, fd) = self.request(bytes);
        assert_eq!(response, ProvisionerResponse::Created { bytes });
        fd.unwrap()
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn exits_by_itself(mut self) -> bool {
        let since = Instant::now();
        while since.elapsed() < TIMEOUT {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
        false
    }
}

#[test]
fn created_memory_outlives_its_provisioner() {
    run_in_subprocess(ONE_GPU, |machine| {
        let provisioner = Provisioner::ready(Command::new(PROGRAM), FIRST);
        let fd = provisioner.create(64 * MIB);
        let listed = machine.usage(0).processes;
        assert!(listed.is_empty(), "NVML lists the provisioner: {listed:?}");
        provisioner.kill();
        assert_eq!(machine.used(0), 64 * MIB);

        let driver = Driver::get().unwrap();
        let context = driver.device(0).unwrap().primary_context().unwrap();
        let with_context = machine.used(0) - 64 * MIB;
        let room = Arc::new(driver.reserve(64 * MIB).unwrap());
        let map = |access| {
            let handle = driver.import(fd.as_fd(), 64 * MIB).unwrap();
            room.map(0, &handle, access, &context).unwrap()
        };
        let mapping = map(Access::ReadWrite);
        mapping.fill(&context, 0, 7, 4096).unwrap();
        drop(mapping);
        let (mapping, mut bytes) = (map(Access::Read), [0; 4096]);
        mapping.read(&context, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
        drop((mapping, fd));
        assert_eq!(machine.used(0), with_context);
    });
}

#[test]
fn provisioner_tells_whether_managed_access_is_concurrent() {
    for (more, expected) in [("", true), ("concurrent-managed-access = false\n", false)] {
        let lab = SimMachine::new(&format!("{ONE_GPU}{more}")).unwrap();
        let provisioner = Provisioner::start(lab.command(PROGRAM), FIRST);
        let (response, _) = provisioner.receive();
        let ProvisionerResponse::Ready {
            concurrent_managed_access,
            ..
        } = response
        else {
            panic!("{response:?}");
        };
        assert_eq!(concurrent_managed_access, expected);
    }
}

#[test]
fn create_rounds_sizes_up_and_reports_the_drivers_code() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let provisioner = Provisioner::ready(lab.command(PROGRAM), FIRST);
    let (response, fd) = provisioner.request(2 * MIB + 1);
    assert_eq!(response, ProvisionerResponse::Created { bytes: 4 * MIB });
    let refused = |bytes| match provisioner.request(bytes) {
        (ProvisionerResponse::Failed { code, call }, None) => (code, call),
        other => panic!("{bytes}: {other:?}"),
    };
    let call = || "cuMemCreate".to_owned();
    // The budget is the GPU's 16 GiB, of which the first descriptor keeps some.
    assert_eq!(refused(17 << 30), (OUT_OF_MEMORY, "budget".to_owned()));
    assert_eq!(refused(16 << 30), (OUT_OF_MEMORY, call()));
    assert_eq!(refused(0), (1, call()));
    assert_eq!(refused(u64::MAX), (1, call()));
    drop(fd);
    provisioner.create(2 * MIB);
}

#[test]
fn create_beyond_what_may_be_lent_is_over_the_budget() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let provisioner = Provisioner::ready(lab.command(PROGRAM), FIRST);
    let create = |bytes, lendable| {
        let (response, _fd) = provisioner.ask(ProvisionerRequest::Create { bytes, lendable });
        response
    };
    let (bytes, call) = (4 * MIB, "budget".to_owned());
    let code = OUT_OF_MEMORY;
    let refused = ProvisionerResponse::Failed { code, call };
    assert_eq!(create(bytes, bytes - 1), refused.clone());
    assert_eq!(create(bytes, bytes), ProvisionerResponse::Created { bytes });
    assert_eq!(create(bytes, 0), refused, "each request has its own");
}

#[test]
fn provisioner_makes_no_context_call() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let sim = lab.sim().unwrap();
    let provisioner = Provisioner::ready(lab.command(PROGRAM), FIRST);
    drop(provisioner.create(64 * MIB));
    provisioner.request(16 << 30);
    provisioner.ask(ProvisionerRequest::AwaitScrub { bytes: 64 * MIB });
    assert_eq!(sim.context_calls(), 0);
    // The scrub check has a context, so the simulated driver does count.
    let mut check = lab.command(PROGRAM);
    check.args(["scrub-check", "--gpu", FIRST]);
    assert!(check.output().unwrap().status.success());
    assert!(sim.context_calls() > 0);
}

#[test]
fn poisoned_provisioner_exits_after_its_answer() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let provisioner = Provisioner::ready(lab.command(PROGRAM), FIRST);
    let pid = provisioner.process.id().to_string();
    lab.run_simgpu(&["poison", &pid, "719"]).unwrap();
    let (response, _) = provisioner.request(2 * MIB);
    let call = "cuMemCreate".to_owned();
    assert_eq!(response, ProvisionerResponse::Failed { code: 719, call });
    let Provisioner { mut process, .. } = provisioner;
    assert!(!process.wait().unwrap().success());
}

#[test]
fn provisioner_creates_memory_of_its_gpu() {
    let lab = SimMachine::new(TWO_GPUS).unwrap();
    let provisioner = Provisioner::ready(lab.command(PROGRAM), SECOND);
    let _fd = provisioner.create(64 * MIB);
    let used = |unit| lab.sim().unwrap().used(unit) >= 64 * MIB;
    assert_eq!([used(0), used(1)], [false, true]);
}

#[test]
fn await_scrub_waits_for_the_driver_and_leaves_nothing() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let provisioner = Provisioner::ready(lab.command(PROGRAM), FIRST);
    drop(provisioner.create(2 * MIB));
    // An answer to this request shows that the provisioner has released its handle.
    assert_eq!(
        provisioner
            .ask(ProvisionerRequest::AwaitScrub { bytes: 0 })
            .0,
        ProvisionerResponse::Scrubbed
    );
    let used = lab.sim().unwrap().used(0);
    let since = Instant::now();
    let response = provisioner
        .ask(ProvisionerRequest::AwaitScrub { bytes: u64::MAX })
        .0;
    let took = since.elapsed();
    assert_eq!(response, ProvisionerResponse::Scrubbed);
    // The simulated GPU has 16 GiB.
    assert!(took >= Duration::from_millis(49), "{took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(lab.sim().unwrap().used(0), used);
}

#[test]
fn provisioner_exits_with_its_agent() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let mut provisioner = Provisioner::ready(lab.command(PROGRAM), FIRST);
    provisioner.socket = UnixStream::pair().unwrap().0;
    assert!(provisioner.exits_by_itself());
}

#[test]
fn provisioner_exits_without_a_driver_or_its_gpu() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let mut without = lab.command(PROGRAM);
    without.env("LD_LIBRARY_PATH", lab.path());
    for (command, gpu) in [(lab.command(PROGRAM), SECOND), (without, FIRST)] {
        let provisioner = Provisioner::start(command, gpu);
        let (response, _) = provisioner.receive();
        assert!(
            matches!(response, ProvisionerResponse::Failed { code: -1, .. }),
            "{response:?}"
        );
        assert!(provisioner.exits_by_itself());
    }
}

#[test]
fn quota_check_compares_the_size_and_exceeds_it() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let check = |bytes: u64| {
        let mut command = lab.command(PROGRAM);
        let bytes = bytes.to_string();
        let output = command.args(["check-quota", "--bytes", &bytes]).output();
        let output = output.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let (fits, text) = check(1 << 30);
    assert!(
        !fits && text.contains("the pod requested 1073741824"),
        "{text}"
    );
    let total = text.split("the GPU has ").nth(1).unwrap();
    let total = total.split(' ').next().unwrap().parse().unwrap();
    let (fits, text) = check(total);
    assert!(fits && text.contains("beyond that is refused"), "{text}");
    assert_eq!(lab.sim().unwrap().used(0), 0);
}

#[test]
fn scrub_check_has_only_a_context_until_it_continues() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let mut command = lab.command(PROGRAM);
    command.args(["scrub-check", "--gpu", FIRST]);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut check = piped.spawn().unwrap();
    let mut lines = BufReader::new(check.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert_eq!(line, r#"{"verdict":"Context"}"#);
    let sim = lab.sim().unwrap();
    assert_eq!(sim.used(0), sim.config.context);
    drop(check.stdin.take());
    let verdict = lines.next().unwrap().unwrap();
    assert!(verdict.contains("Scrubbed"), "{verdict}");
    assert!(check.wait().unwrap().success());
    assert_eq!(lab.sim().unwrap().used(0), 0);
}

#[test]
fn scrub_check_reports_whether_freed_memory_is_cleared() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let check = || {
        let mut command = lab.command(PROGRAM);
        let output = command
            .args(["scrub-check", "--gpu", FIRST])
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let scrubbed = check();
    assert!(scrubbed.contains(r#""verdict":"Scrubbed""#), "{scrubbed}");
    lab.run_simgpu(&["scrub", "off"]).unwrap();
    let old = check();
    assert!(old.contains(r#""verdict":"NotScrubbed""#), "{old}");
    assert_eq!(lab.sim().unwrap().used(0), 0);
    lab.run_simgpu(&["lose", "0"]).unwrap();
    let lost = check();
    assert!(lost.contains(r#""verdict":"Failed""#), "{lost}");
}
