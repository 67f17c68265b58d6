//! Copies typed memory between two GPUs, checks the content, and measures the copies.
//!
//! `cargo run --release --package bursar-gpu-programs --bin peers [MIB]` copies MIB (1,024) in each
//! direction, without peer access and with it. Then it copies shared memory behind a kernel of 20
//! ms on the other GPU. It prints one JSON object: the wrong copies, the median bandwidths in GB/s,
//! and the GPUs whose tokens a child process could redeem (in a container of Bursar).
//! `e2e/gpu/programs/peer_copy.py` measures the same copies by PyTorch.
//!
//! `peers redeem TOKEN...` is that child: it prints the GPU of each token.

mod slow_add;

use std::error::Error;
use std::process::Command;
use std::time::{Duration, Instant};

use bursar_runtime::memory::gpu_token::TokenError;
use bursar_runtime::memory::peer_copy;
use bursar_runtime::{
    DeviceChecksum, DeviceRuntime, GpuRef, GpuToken, Launch, Tag, TokenClient, TrackedSlice,
    checksum,
};

use crate::slow_add::{GRID, ITEMS, slow_add};

type Done<T> = Result<T, Box<dyn Error>>;

const ROUNDS: usize = 15;

/// The copies of shared memory, in both directions in turn.
const SHARED_COPIES: u32 = 20;

/// A block of memory on each GPU, and the number of copies with wrong content.
struct Peers<'a> {
    runtimes: [&'a DeviceRuntime; 2],
    blocks: [TrackedSlice<u8>; 2],
    wrong: usize,
}

impl Peers<'_> {
    /// Copies one block to the other, compares the checksums, and returns the seconds that the copy
    /// took.
    fn copy(&mut self, from: usize, seed: u8) -> Done<f64> {
        let bytes: Vec<u8> = (0..self.blocks[0].len())
            .map(|at| (at as u8).wrapping_mul(31) ^ seed)
            .collect();
        let [first, second] = &mut self.blocks;
        let (source, target) = if from == 0 {
            (first, second)
        } else {
            (second, first)
        };
        source.copy_from_host(&bytes)?;
        source.stream().synchronize()?;
        target.stream().synchronize()?;
        let start = Instant::now();
        peer_copy::copy(source, target)?;
        target.stream().synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        let mut kernel = DeviceChecksum::new(self.runtimes[1 - from].context())?;
        let found = kernel.of(target.address(), bytes.len() as u64, target.stream())?;
        self.wrong += usize::from(found != checksum::of(&bytes));
        Ok(seconds)
    }

    /// Returns the median bandwidth of the copies in both directions, in GB/s.
    fn bandwidth(&mut self) -> Done<f64> {
        let mut seconds = Vec::new();
        for round in 0..ROUNDS {
            seconds.push(self.copy(round % 2, round as u8)?);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(self.blocks[0].len() as f64 / seconds[ROUNDS / 2] / 1e9)
    }
}

/// Adds to the memory of one GPU and copies it to the other one's, in turn, and returns the wrong
/// copies. The host waits for nothing: the references order each copy behind the addition before
/// it, and each addition behind the copy.
fn copy_shared(runtimes: [&DeviceRuntime; 2]) -> Done<usize> {
    let (mut memories, mut kernels) = (Vec::new(), Vec::new());
    for runtime in runtimes {
        let stream = runtime.stream()?;
        let mut slice = TrackedSlice::<u32>::allocate(runtime, ITEMS, &stream, Tag("shared"))?;
        slice.copy_from_host(&[0; ITEMS])?;
        memories.push(GpuRef::from(slice));
        kernels.push(slow_add(runtime)?);
    }
    let mut wrong = 0;
    let mut expected = 0;
    for number in 1..=SHARED_COPIES {
        let from = number as usize % 2;
        let [source, target] = [&memories[from], &memories[1 - from]];
        let (adding, copying) = (runtimes[from].stream()?, runtimes[1 - from].stream()?);
        let token = source.begin_write(Instant::now(), Duration::from_secs(60))?;
        Launch::new(&kernels[from], &adding, GRID)
            .arg(source.arg_mut(&token)?)
            .arg(number)
            .arg(ITEMS as u64)
            .submit()?;
        source.commit(token, Instant::now())?;
        let token = target.begin_write(Instant::now(), Duration::from_secs(60))?;
        peer_copy::copy_shared(source, target, &token, &copying)?;
        target.commit(token, Instant::now())?;
        expected += number;
        // Each fifth copy is read; the others have the next addition right behind them.
        if number % 5 == 0 {
            let mut items = [0; ITEMS];
            target.copy_to_host(&mut items)?;
            wrong += usize::from(items != [expected; ITEMS]);
        }
    }
    Ok(wrong)
}

/// Lets a child process redeem a token of each GPU, and returns the GPUs that it read.
fn redeemed_by_child(runtimes: [&DeviceRuntime; 2]) -> Done<Vec<String>> {
    let agent = TokenClient::in_container();
    let mut child = Command::new(std::env::current_exe()?);
    child.arg("redeem");
    for runtime in runtimes {
        match agent.seal_allocation(runtime.context().uuid(), 1) {
            Ok(token) => child.arg(hex(token.as_bytes())),
            Err(TokenError::AgentUnreachable { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
    }
    let output = child.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let gpus = String::from_utf8(output.stdout)?;
    Ok(gpus.lines().map(str::to_owned).collect())
}

fn redeem(tokens: &[String]) -> Done<()> {
    let agent = TokenClient::in_container();
    for token in tokens {
        let (pairs, _) = token.as_bytes().as_chunks::<2>();
        let bytes = pairs
            .iter()
            .map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?))
            .collect::<Done<Vec<u8>>>()?;
        println!("{}", agent.redeem(&GpuToken::try_from(bytes)?)?.gpu);
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn main() -> Done<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(("redeem", tokens)) = arguments.split_first().map(|(word, rest)| (&**word, rest)) {
        return redeem(tokens);
    }
    let mebibytes: usize = arguments.first().map_or(Ok(1024), |word| word.parse())?;
    let (one, other) = (
        DeviceRuntime::for_ordinal(0)?,
        DeviceRuntime::for_ordinal(1)?,
    );
    let block = |runtime: &DeviceRuntime| -> Done<TrackedSlice<u8>> {
        let stream = runtime.stream()?;
        Ok(TrackedSlice::allocate(
            runtime,
            mebibytes << 20,
            &stream,
            Tag("peer"),
        )?)
    };
    let blocks = [block(&one)?, block(&other)?];
    let mut peers = Peers {
        runtimes: [&one, &other],
        blocks,
        wrong: 0,
    };
    let without_access = peers.bandwidth()?;
    one.context().enable_peer_access(other.context())?;
    other.context().enable_peer_access(one.context())?;
    let with_access = peers.bandwidth()?;
    let wrong_shared = copy_shared([&one, &other])?;
    let gpus = [&one, &other].map(|runtime| runtime.context().uuid().to_string());
    println!(
        "{{\"copies\": {}, \"shared_copies\": {SHARED_COPIES}, \"wrong\": {}, \"without_access_gb_per_s\": {without_access:.1}, \
         \"with_access_gb_per_s\": {with_access:.1}, \"gpus\": {gpus:?}, \"redeemed\": {:?}}}",
        2 * ROUNDS,
        peers.wrong + wrong_shared,
        redeemed_by_child([&one, &other])?,
    );
    Ok(())
}
