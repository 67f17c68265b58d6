//! Tests memory tokens: each is valid in its namespace until its lease, process image or GPU
//! generation has ended.

use std::fs;
use std::time::{Duration, Instant};

use bursar_protocol::messages::token::{Generation, GpuToken, MAX_TOKEN, TokenRefusal};
use bursar_runtime::memory::gpu_token::verify;

use crate::api::FakeGpuNodeApi;
use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::fixture::{Fixture, GIB, open_retrying};
use crate::machine::GPU;
use crate::tenant_process::{Opened, Tenant};

const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Sends a command, and repeats it while the agent refuses for a transient reason.
fn ask_retrying(tenant: &mut Tenant, line: &str) -> String {
    let start = Instant::now();
    loop {
        let answer = tenant.ask(line).unwrap();
        let is_transient = answer == "refused Unavailable" || answer.starts_with("away");
        if !is_transient || start.elapsed() > WAIT_LIMIT {
            return answer;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns a token for a block of a lease, or of the process's own memory where `lease` is zero.
fn seal(tenant: &mut Tenant, lease: u64, block: u64) -> Result<String, String> {
    let answer = ask_retrying(tenant, &format!("seal {lease} {block}"));
    let token = answer.strip_prefix("token ").map(str::to_owned);
    token.ok_or(answer)
}

/// Redeems a token. Returns its lease id and block, or the refusal.
pub(crate) fn redeem(tenant: &mut Tenant, token: &str) -> Result<(u64, u64), String> {
    let answer = ask_retrying(tenant, &format!("redeem {token}"));
    let words: Vec<&str> = answer.split(' ').collect();
    match words[..] {
        ["good", lease, block] => Ok((lease.parse().unwrap(), block.parse().unwrap())),
        _ => Err(answer),
    }
}

fn refusal_text(why: TokenRefusal) -> String {
    format!("refused {why:?}")
}

/// Whether the agent refused a token because this kind of generation has ended.
pub(crate) fn is_fenced(redeemed: &Result<(u64, u64), String>, which: Generation) -> bool {
    let prefix = format!("refused Fenced {{ which: {which:?},");
    redeemed
        .as_ref()
        .is_err_and(|answer| answer.starts_with(&prefix))
}

/// Verifies a token as a program on another node does, by the `GpuNode` alone. Returns whether the
/// GPU has the token's generation, if the node's key has signed the token.
fn is_current_by_status(api: &FakeGpuNodeApi, token: &str) -> Option<bool> {
    let status = api.status();
    let key = status["tokenKey"]["publicKey"].as_str()?.parse().ok()?;
    let (pairs, _) = token.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let token = GpuToken::try_from(pairs.iter().map(byte).collect::<Vec<u8>>()).unwrap();
    let id = verify(&token, &key).ok()?;
    assert_eq!((id.node.as_str(), id.block), ("node-1", 1));
    Some(api.gpu(&id.gpu)["generation"].as_u64() == Some(id.generations.gpu))
}

/// Starts a pod of another namespace.
pub(crate) async fn start_pod_of_other_namespace(fixture: &Fixture, name: &str) -> Pod {
    let mut pod = Pod::with(name, GPU, 1);
    pod.namespace = "other".to_owned();
    fixture.machine.kubelet.admit(&pod).await.unwrap();
    fs::create_dir_all(fixture.machine.cgroup(&pod)).unwrap();
    fixture.machine.start(&pod).await.unwrap();
    pod
}

#[tokio::test]
async fn token_is_valid_in_its_namespace_until_its_source_ends() {
    let mut fixture = Fixture::new().await;
    let (first, second) = (
        fixture.machine.run("a", 4).await,
        fixture.machine.run("b", 4).await,
    );
    let third = start_pod_of_other_namespace(&fixture, "c").await;
    let (mut issuer, mut reader) = (fixture.tenant(&first), fixture.tenant(&second));
    let mut other = fixture.tenant(&third);
    assert_eq!(
        seal(&mut issuer, 0, 7),
        Err(refusal_text(TokenRefusal::NoSession))
    );
    for tenant in [&mut issuer, &mut reader] {
        assert_eq!(tenant.ask("hello").as_deref(), Some("welcome"));
    }
    let own = seal(&mut issuer, 0, 7).unwrap();
    let Ok(Opened::Write { lease, token }) = open_retrying(&mut issuer, "weights", GIB) else {
        panic!("it is there");
    };
    assert_eq!(issuer.commit(lease, token, 42), "committed");
    let kept = seal(&mut issuer, lease, 8).unwrap();
    assert_eq!(
        seal(&mut reader, lease, 8),
        Err(refusal_text(TokenRefusal::NoLease)),
        "it has not opened it"
    );
    assert_eq!(redeem(&mut reader, &own), Ok((0, 7)));
    assert_eq!(redeem(&mut reader, &kept), Ok((lease, 8)));
    let unknown = Err(refusal_text(TokenRefusal::Unknown));
    assert_eq!(redeem(&mut other, &own), unknown);
    assert_eq!(redeem(&mut other, &kept), unknown);

    let garbage = Err(refusal_text(TokenRefusal::Malformed));
    assert_eq!(redeem(&mut other, "00"), garbage);
    assert_eq!(redeem(&mut other, &"5a".repeat(MAX_TOKEN)), garbage);
    let forged = match own.strip_suffix('0') {
        Some(own) => format!("{own}1"),
        None => format!("{}0", &own[..own.len() - 1]),
    };
    let forged = redeem(&mut other, &forged);
    assert_eq!(forged, Err(refusal_text(TokenRefusal::Forged)));
    let longer = format!("babble {}", MAX_TOKEN + 1);
    assert_eq!(other.ask(&longer).as_deref(), Some("hung up"));

    fixture.machine.restart_agent().await;
    assert_eq!(redeem(&mut reader, &own), Ok((0, 7)));
    assert_eq!(redeem(&mut reader, &kept), Ok((lease, 8)));

    let discarded = ask_retrying(&mut issuer, &format!("discard {lease}"));
    assert_eq!(discarded, "discarded");
    let ended = redeem(&mut reader, &kept);
    assert!(is_fenced(&ended, Generation::Lease), "{ended:?}");
    assert_eq!(redeem(&mut reader, &own), Ok((0, 7)));

    issuer.exec();
    fixture.connect_tenant(&first, &mut issuer);
    assert_eq!(issuer.ask("hello").as_deref(), Some("welcome"));
    let ended = redeem(&mut reader, &own);
    assert!(is_fenced(&ended, Generation::Process), "{ended:?}");

    let own = seal(&mut issuer, 0, 9).unwrap();
    assert_eq!(redeem(&mut reader, &own), Ok((0, 9)));
    fixture.machine.kill_agent();
    fs::write(fixture.machine.path("run/token.key"), "garbage").unwrap();
    fixture.machine.start_successor().await;
    let lost = redeem(&mut reader, &own);
    assert_eq!(lost, Err(refusal_text(TokenRefusal::Forged)));
    let own = seal(&mut issuer, 0, 9).unwrap();
    assert_eq!(redeem(&mut reader, &own), Ok((0, 9)));

    issuer.kill();
    fixture.machine.end(&first);
    eventually("the end of the pod", || {
        redeem(&mut reader, &own) == Err(refusal_text(TokenRefusal::Unknown))
    })
    .await;
}

#[tokio::test]
async fn token_ends_with_the_gpu_generation_or_process_image() {
    let mut fixture = Fixture::new().await;
    let api = FakeGpuNodeApi::start(&fixture.machine);
    fixture.machine.restart_agent().await;
    let (first, second) = (
        fixture.machine.run("a", 4).await,
        fixture.machine.run("b", 4).await,
    );
    let (mut issuer, mut reader) = (fixture.tenant(&first), fixture.tenant(&second));
    assert_eq!(issuer.ask("hello").as_deref(), Some("welcome"));
    let before = seal(&mut issuer, 0, 1).unwrap();
    eventually("the public key", || {
        is_current_by_status(&api, &before) == Some(true)
    })
    .await;
    assert_eq!(redeem(&mut reader, &before), Ok((0, 1)));
    let (_, gpu) = fixture.allocation_and_gpu(&first);
    fixture.machine.lab.run_simgpu(&["lose", &gpu]).unwrap();
    fixture.machine.kubelet.until_allocatable(GPU, 16).await;
    fixture.machine.lab.run_simgpu(&["restore", &gpu]).unwrap();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    eventually("the next generation", || {
        is_fenced(&redeem(&mut reader, &before), Generation::Gpu)
    })
    .await;
    let after = seal(&mut issuer, 0, 1).unwrap();
    assert_eq!(redeem(&mut reader, &after), Ok((0, 1)));
    eventually("the generation in the status", || {
        is_current_by_status(&api, &after) == Some(true)
    })
    .await;
    assert_eq!(is_current_by_status(&api, &before), Some(false));

    let pid = issuer.pid().to_string();
    let xid = ["xid", &gpu, "31", "--pid", &pid];
    fixture.machine.lab.run_simgpu(&xid).unwrap();
    eventually("the fence", || {
        is_fenced(&redeem(&mut reader, &after), Generation::Process)
    })
    .await;
}
