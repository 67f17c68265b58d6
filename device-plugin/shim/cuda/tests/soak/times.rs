//! Counts call times by powers of two of a nanosecond.

/// A histogram, and the longest time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    buckets: Vec<u64>,
    pub(crate) longest: u64,
}

impl Times {
    /// Adds another histogram.
    pub(crate) fn add(&mut self, longest: u64, buckets: &[u64]) {
        self.buckets
            .resize(self.buckets.len().max(buckets.len()), 0);
        for (sum, count) in self.buckets.iter_mut().zip(buckets) {
            *sum += count;
        }
        self.longest = self.longest.max(longest);
    }

    /// Adds one call.
    pub(crate) fn note(&mut self, nanoseconds: u64) {
        let mut bucket = vec![0; nanoseconds.max(1).ilog2() as usize + 2];
        if let Some(last) = bucket.last_mut() {
            *last = 1;
        }
        self.add(nanoseconds, &bucket);
    }

    /// Returns the number of calls.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns an upper bound, in nanoseconds, of all but one call in `part`.
    pub(crate) fn all_but_one_in(&self, part: u64) -> u64 {
        let rest = self.count() / part;
        let mut above = 0;
        for (place, count) in self.buckets.iter().enumerate().rev() {
            above += count;
            if above > rest {
                return (1 << place).min(self.longest);
            }
        }
        0
    }

    /// Returns the median, the 99th percentile and the longest time as text.
    pub(crate) fn line(&self) -> String {
        let [half, most, longest] = [
            self.all_but_one_in(2),
            self.all_but_one_in(100),
            self.longest,
        ]
        .map(readable);
        format!("p50 {half} p99 {most} max {longest}")
    }
}

fn readable(nanoseconds: u64) -> String {
    match nanoseconds {
        0..10_000 => format!("{nanoseconds} ns"),
        10_000..10_000_000 => format!("{} us", nanoseconds / 1000),
        _ => format!("{} ms", nanoseconds / 1_000_000),
    }
}
