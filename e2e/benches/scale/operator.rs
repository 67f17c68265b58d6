//! Runs the operator's process, and reads its metrics and its resources.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Ticks of `/proc/PID/stat` in a second (`USER_HZ`, proc(5)).
const TICKS_PER_SECOND: f64 = 100.0;
/// The timeout of the operator's exit after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The running operator.
pub(crate) struct Operator {
    child: Child,
    pid: i32,
    listen: SocketAddr,
    pub(crate) started: Instant,
}

/// Values of the operator's `/metrics`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Reconciles of a budget that succeeded.
    pub(crate) reconciles: u64,
    /// Reconciles of a budget that failed.
    pub(crate) failed: u64,
    /// Written statuses of budgets.
    pub(crate) statuses: u64,
    /// Written labels of nodes.
    pub(crate) labels: u64,
    /// Written context policies.
    pub(crate) policies: u64,
    /// Requested evictions of pods.
    pub(crate) evictions: u64,
    /// Writes of all kinds, failed attempts included. Events are not counted.
    pub(crate) writes: u64,
    /// Plans of the placement, and their time in microseconds.
    pub(crate) plans: u64,
    pub(crate) plan_micros: u64,
    /// Budgets that are Ready.
    pub(crate) ready: u64,
}

impl Sample {
    fn read(text: &str) -> Self {
        let mut sample = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let value = value.parse::<f64>().unwrap_or_default();
            let count = value as u64;
            let name = series.split('{').next().unwrap_or_default();
            let says = |label: &str| series.contains(label);
            match name {
                "bursar_operator_reconciles_total" if says("\"error\"") => sample.failed += count,
                "bursar_operator_reconciles_total" => sample.reconciles += count,
                "bursar_operator_plan_seconds_count" => sample.plans = count,
                "bursar_operator_plan_seconds_sum" => sample.plan_micros = (value * 1e6) as u64,
                "bursar_operator_writes_total" => {
                    sample.writes += count;
                    if says("\"status\"") {
                        sample.statuses += count;
                    }
                    if says("\"contexts\"") {
                        sample.policies += count;
                    }
                    if says("\"eviction\"") {
                        sample.evictions += count;
                    }
                }
                // The other steps write evictions, which the metric above counts.
                "bursar_operator_placement_steps_total"
                    if says("\"label\"") || says("\"reserve\"") || says("\"lower\"") =>
                {
                    sample.writes += count;
                    if says("\"label\"") && says("\"done\"") {
                        sample.labels += count;
                    }
                }
                "bursar_operator_budgets" if says("\"Ready\"") && says("\"True\"") => {
                    sample.ready = count;
                }
                _ => {}
            }
        }
        sample
    }
}

impl Operator {
    /// Starts the operator with its log in the file `log`.
    pub(crate) fn start(program: &Path, kubeconfig: &Path, log: &Path) -> anyhow::Result<Self> {
        // Another process may bind the port first; the operator then exits with an error.
        let listen = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let child = Command::new(program)
            .arg(format!("--listen={listen}"))
            .arg("--probes=127.0.0.1:0")
            .env("KUBECONFIG", kubeconfig)
            .stdin(Stdio::null())
            .stderr(fs::File::create(log)?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let pid = child.id().context("it has just started")?;
        Ok(Self {
            child,
            pid: i32::try_from(pid)?,
            listen,
            started: Instant::now(),
        })
    }

    /// Reads the metrics; all values are 0 while the operator does not answer.
    pub(crate) async fn sample(&mut self) -> anyhow::Result<Sample> {
        if let Some(status) = self.child.try_wait()? {
            anyhow::bail!("the operator ended: {status}");
        }
        let text = self.get("/metrics").await.unwrap_or_default();
        Ok(Sample::read(&text))
    }

    async fn get(&self, path: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.listen).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: operator\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// Returns the resident memory in MiB: the present value and the peak.
    pub(crate) fn memory(&self) -> anyhow::Result<(f64, f64)> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let of = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<f64>().ok()
        };
        let now = of("VmRSS:").context("VmRSS")?;
        Ok((now / 1024.0, of("VmHWM:").context("VmHWM")? / 1024.0))
    }

    /// Returns the processor seconds that the operator has used.
    pub(crate) fn cpu(&self) -> anyhow::Result<f64> {
        cpu(self.pid)
    }

    /// Stops the operator by SIGTERM, as the kubelet does.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_raw(self.pid).context("a process id")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = timeout(EXIT_TIMEOUT, self.child.wait()).await??;
        anyhow::ensure!(status.success(), "the operator ended with {status}");
        Ok(())
    }
}

/// Returns the processor seconds that a process has used (proc(5): `utime` and `stime`).
pub(crate) fn cpu(pid: i32) -> anyhow::Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("/proc/PID/stat")?;
    let ticks = fields.split(' ').skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|field| field.parse::<f64>().ok()).sum();
    Ok(ticks / TICKS_PER_SECOND)
}
