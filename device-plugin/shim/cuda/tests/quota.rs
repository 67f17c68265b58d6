//! Tests that a program on the simulated driver is held to its quota, to the byte.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bursar_ledger::units::Bytes;
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::fd_passing::send_with_fd;
use bursar_protocol::messages::{self, Message, Quota, Response};
use bursar_protocol::units::Units;
use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;
/// Half of what a call waits for an agent that is down.
const AT_ONCE: Duration = Duration::from_secs(5);

#[test]
fn quota_fits_exactly_and_one_byte_more_is_denied() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for bytes in [QUOTA - 1, QUOTA] {
        let pointer = program.ok(format!("alloc {bytes}"))[0];
        assert_eq!(program.call("alloc 1"), "err 2");
        program.ok(format!("free {pointer}"));
    }
    assert_eq!(program.call(format!("alloc {}", QUOTA + 1)), "err 2");
    container.wait_for("three denials", |usage| usage.denied == 3);
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn mem_info_shows_the_quota_and_the_siblings_usage() {
    let container = Container::with_quota(QUOTA);
    let (mut first, mut second) = (container.program(), container.program());
    assert_eq!(first.ok("info"), [QUOTA, QUOTA]);
    assert_eq!(first.ok("total"), [QUOTA]);
    let pointer = second.ok(format!("alloc {}", 100 * MIB))[0];
    assert_eq!(first.ok("info"), [QUOTA - 100 * MIB, QUOTA]);
    assert_eq!(second.ok("info"), [QUOTA - 100 * MIB, QUOTA]);
    second.ok(format!("free {pointer}"));
    assert_eq!(first.ok("info"), [QUOTA, QUOTA]);
}

#[test]
fn mem_info_shows_the_quota_when_an_output_is_null() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pointer = program.ok(format!("alloc {}", 100 * MIB))[0];
    assert_eq!(program.ok("info-free"), [QUOTA - 100 * MIB]);
    assert_eq!(program.ok("info-total"), [QUOTA]);
    program.ok(format!("free {pointer}"));
    assert_eq!(program.ok("info-free"), [QUOTA]);
}

#[test]
fn racing_processes_get_exactly_the_quotas_last_bytes() {
    let container = Container::with_quota(QUOTA);
    let mut programs: Vec<_> = (0..6).map(|_| container.program()).collect();
    // The driver takes whole chunks of 2 MiB for each above 1 MiB.
    for (chunk, taken) in [(MIB, MIB), (3 * MIB + 4096, 4 * MIB)] {
        programs
            .iter_mut()
            .for_each(|program| program.send(&format!("greedy {chunk}")));
        let answers: Vec<_> = programs.iter_mut().map(|program| program.read()).collect();
        let got: u64 = answers
            .iter()
            .map(|answer| {
                let words: Vec<_> = answer.split_whitespace().collect();
                assert_eq!(words[2], "2", "{answer}");
                words[1].parse::<u64>().unwrap()
            })
            .sum();
        assert_eq!(got, QUOTA / taken);
        let usage = container.usage();
        assert!(usage.granted.0 + usage.exited.0 <= QUOTA, "{usage:?}");
        programs.drain(..).for_each(Client::kill);
        container.wait_for("everything is free again", |usage| {
            usage.exited.0 == 0 && usage.processes == 0
        });
        programs.extend((0..6).map(|_| container.program()));
    }
}

#[test]
fn killed_program_leaves_nothing_charged() {
    let container = Container::with_quota(QUOTA);
    for _ in 0..5 {
        let mut program = container.program();
        program.ok(format!("alloc {QUOTA}"));
        program.kill();
        container.wait_for("the memory is free", |usage| {
            usage.granted.0 == 0 && usage.exited.0 == 0
        });
    }
}

#[test]
fn killed_programs_memory_stays_charged_while_its_child_lives() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok(format!("alloc {QUOTA}"));
    let child = program.ok("linger 60000")[0];
    let mut other = container.program();
    program.kill();
    container.wait_for("its death is noticed", |usage| usage.exited.0 >= QUOTA);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(other.call("alloc 1"), "err 2");
    // SAFETY: sends a signal, to a process that lives for a minute.
    assert_eq!(unsafe { libc::kill(child as i32, libc::SIGKILL) }, 0);
    container.wait_for("the child has ended", |usage| usage.exited.0 == 0);
    other.ok(format!("alloc {QUOTA}"));
}

#[test]
fn exec_discharges_the_earlier_image() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok(format!("alloc {QUOTA}"));
    assert_eq!(program.call("exec"), "ready");
    assert_eq!(program.ok("info")[1], QUOTA);
    container.wait_for("the old image's memory is free", |usage| {
        usage.exited.0 == 0
    });
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn granted_credit_stays_usable_without_the_agent() {
    let mut container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pointer = program.ok(format!("alloc {}", 128 * MIB))[0];
    container.stop_agent();
    let took = |program: &mut Client, bytes: u64| {
        let start = Instant::now();
        assert_eq!(program.call(format!("alloc {bytes}")), "err 2");
        start.elapsed()
    };
    let start = Instant::now();
    program.ok(format!("free {pointer}"));
    let again = program.ok(format!("alloc {}", 128 * MIB))[0];
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    // No agent would grant that.
    let waited = took(&mut program, 129 * MIB);
    assert!(waited < AT_ONCE, "{waited:?}");
    // A restarting agent might grant it, so the call waits, once.
    let waited = took(&mut program, 128 * MIB);
    assert!(waited >= Duration::from_secs(9), "{waited:?}");
    let waited = took(&mut program, 128 * MIB);
    assert!(waited < AT_ONCE, "{waited:?}");

    container.start_agent();
    assert_eq!(program.call(format!("alloc {}", 129 * MIB)), "err 2");
    program.ok(format!("alloc {}", 128 * MIB));
    program.ok(format!("free {again}"));
    program.ok(format!("alloc {}", 128 * MIB));
    assert_eq!(program.call("alloc 1"), "err 2");
}

#[test]
fn programs_wait_for_a_restarting_agent() {
    let mut container = Container::with_quota(QUOTA);
    let (mut runs, mut starts) = (container.program(), container.program());
    runs.ok(format!("alloc {}", 64 * MIB));
    container.stop_agent();
    runs.send(&format!("alloc {}", 64 * MIB));
    starts.send("exec");
    std::thread::sleep(Duration::from_secs(2));
    container.start_agent();
    let answer = runs.read();
    assert!(answer.starts_with("ok"), "{answer}");
    assert_eq!(starts.read(), "ready");
    starts.ok(format!("alloc {}", 64 * MIB));
}

#[test]
fn restarted_agent_reserves_what_a_silent_process_holds() {
    let mut container = Container::with_quota(QUOTA);
    let mut silent = container.program();
    silent.ok(format!("alloc {}", 200 * MIB));
    for _ in 0..3 {
        container.stop_agent();
        container.start_agent();
        let mut other = container.program();
        // The silent process's idle credit stays its own until that process connects again.
        assert!(other.ok("info")[0] <= 56 * MIB);
        let before = other.ok(format!("greedy {MIB}"))[0];
        assert_eq!(silent.call(format!("alloc {}", 57 * MIB)), "err 2");
        let after = other.ok(format!("greedy {MIB}"))[0];
        assert_eq!(before + after, 56);
        assert_eq!(silent.ok("info"), [0, QUOTA]);
        other.kill();
        container.wait_for("the other is gone", |usage| usage.exited.0 == 0);
    }
    container.stop_agent();
    silent.kill();
    container.start_agent();
    container.wait_for("the dead is noticed", |usage| {
        usage.exited.0 == 0 && usage.granted.0 == 0
    });
    container.program().ok(format!("alloc {QUOTA}"));
}

#[test]
fn wait_is_bounded_when_the_agent_never_answers() {
    let mut container = Container::with_quota(QUOTA);
    container.stop_agent();
    std::fs::remove_file(container.socket()).unwrap();
    let _mute = std::os::unix::net::UnixListener::bind(container.socket()).unwrap();
    let start = Instant::now();
    // The program creates a context before anything else, which may need credit.
    let mut program = container.program();
    assert_eq!(program.call("retain"), "err 2");
    assert!(
        start.elapsed() < Duration::from_secs(15),
        "it waits once: {:?}",
        start.elapsed()
    );
    let start = Instant::now();
    assert_eq!(program.call("retain"), "err 2");
    assert!(
        start.elapsed() < AT_ONCE,
        "the second does not wait: {:?}",
        start.elapsed()
    );
}

/// Returns an agent's answer to a handshake.
fn welcome() -> Vec<u8> {
    let account = |account| Quota {
        account,
        bytes: QUOTA,
    };
    let accounts = [
        messages::Account::Device(support::GPU.to_owned()),
        messages::Account::Managed,
    ];
    let welcome = Response::Welcome {
        version: 1,
        generation: None,
        quotas: accounts.map(account).to_vec(),
    };
    welcome.frame()
}

#[test]
fn request_is_repeated_when_the_agent_dies_before_its_answer() {
    let mut container = Container::with_quota(QUOTA);
    container.stop_agent();
    std::fs::remove_file(container.socket()).unwrap();
    let dying = std::os::unix::net::UnixListener::bind(container.socket()).unwrap();
    std::thread::spawn(move || {
        // Each client is accepted, and disconnected at its next message.
        for mut stream in dying.incoming().map_while(Result::ok) {
            let mut bytes = [0; 4096];
            let _ = stream.read(&mut bytes);
            let (_page, fd) = CreditPage::create(2).unwrap();
            let _ = send_with_fd(&stream, &welcome(), fd);
            let _ = stream.read(&mut bytes);
        }
    });
    let mut program = container.program();
    for _ in 0..3 {
        assert_eq!(program.call("alloc 4096"), "err 2");
    }
    container.start_agent();
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn mem_info_is_right_while_another_thread_migrates_pages() {
    let mut container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok(format!("alloc {}", 2 * MIB));
    container.stop_agent();
    std::fs::remove_file(container.socket()).unwrap();
    let slow = std::os::unix::net::UnixListener::bind(container.socket()).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = slow.accept().unwrap();
        let mut bytes = [0; 4096];
        let _ = stream.read(&mut bytes);
        std::thread::sleep(Duration::from_millis(500));
        let (page, fd) = CreditPage::create(2).unwrap();
        let [quota, used] = [QUOTA, 2 * MIB].map(|bytes| Units::holding(bytes).unwrap());
        let slot = page.slot(0).unwrap();
        slot.set_quota(quota);
        slot.set(CreditWord {
            granted: quota.0,
            used: used.0,
        });
        send_with_fd(&stream, &welcome(), fd).unwrap();
        // The request: the page has the credit already.
        let _ = stream.read(&mut bytes);
        let (account, units) = (0, quota);
        let granted = Response::Granted { account, units };
        stream.write_all(&granted.frame()).unwrap();
        stream.read(&mut bytes)
    });
    program.ok(format!("start alloc {}", 200 * MIB));
    while program.ok("started") == [1] {
        let free = program.ok("info")[0];
        assert!([254 * MIB, 54 * MIB].contains(&free), "{free}");
    }
    let answer = program.call("join");
    assert!(answer.starts_with("ok"), "{answer}");
}

#[test]
fn allocation_before_cuinit_does_not_break_later_ones() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    assert_eq!(program.call("early"), "early 3 3");
    assert_eq!(program.read(), "ready");
    program.ok("retain");
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn garbage_on_the_socket_does_not_slow_programs() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let hostile: Vec<_> = (0..50)
        .map(|number: u8| {
            let mut stream = UnixStream::connect(container.socket()).unwrap();
            let _ = stream.write_all(&[number; 300]);
            stream
        })
        .collect();
    let start = Instant::now();
    assert_eq!(program.ok(format!("greedy {MIB}")), [256, 2]);
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    drop(hostile);
}

#[test]
fn pitched_memory_is_charged_by_the_drivers_pitch() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    // Rows of 1,024 bytes take more than 4 MiB, and rows of 1,000 bytes would not.
    let pointer = program.ok("pitch 1000 4150")[0];
    assert_eq!(container.usage().used, Bytes(6 * MIB));
    program.ok(format!("free {pointer}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn function_that_the_driver_lacks_returns_an_error() {
    let container = Container::with_quota(QUOTA);
    assert_eq!(container.program().call("missing"), "err 801");
}

#[test]
fn forked_child_uses_none_of_its_parents_credit() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok(format!("alloc {MIB}"));
    assert_eq!(program.ok("fork"), [3], "the driver says NOT_INITIALIZED");
    program.ok(format!("alloc {MIB}"));
    assert_eq!(container.usage().used, Bytes(2 * MIB));
}

#[test]
fn refused_or_second_free_changes_no_charge() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pointer = program.ok(format!("alloc {}", 2 * MIB))[0];
    assert!(
        program
            .call(format!("free {}", pointer + 512))
            .starts_with("err")
    );
    assert_eq!(container.usage().used, Bytes(2 * MIB));
    program.ok(format!("free {pointer}"));
    assert!(program.call(format!("free {pointer}")).starts_with("err"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn device_reset_discharges_its_primary_context() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for _ in 0..3 {
        program.ok(format!("alloc {}", QUOTA / 8 * 5));
        program.ok("reset");
        assert_eq!(container.usage().used, Bytes::ZERO);
    }
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn primary_context_is_discharged_by_its_last_release_only() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok("retain");
    program.ok(format!("alloc {QUOTA}"));
    program.ok("release");
    assert_eq!(container.usage().used, Bytes(QUOTA));
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok("release");
    assert_eq!(container.usage().used, Bytes::ZERO);
    assert!(program.call("release").starts_with("err"));
    program.ok("retain");
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn destroyed_context_discharges_only_its_own_memory() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let first = program.ok(format!("alloc {}", 10 * MIB))[0];
    let context = program.ok("context")[0];
    program.ok(format!("alloc {}", QUOTA - 10 * MIB));
    assert_eq!(program.call("alloc 1"), "err 2");
    assert!(
        program
            .call(format!("destroy {}", context + 1))
            .starts_with("err")
    );
    assert_eq!(container.usage().used, Bytes(QUOTA));
    program.ok(format!("destroy {context}"));
    assert_eq!(container.usage().used, Bytes(10 * MIB));
    program.ok(format!("free {first}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
    program.ok(format!("alloc {QUOTA}"));
}
