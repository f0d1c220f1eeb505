//! The values behind [`crate::names`], and their text form.
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use base::BuildInfo;
use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::names::{self, Kind, Metric};

/// Most series of one metric. Label values beyond it are counted as dropped, not kept.
pub const MAX_SERIES: usize = 1_000;

type Labels = Vec<(&'static str, String)>;
type Counters = Family<Labels, Counter>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

#[derive(Debug)]
enum Instrument {
    Counter(Counters),
    Gauge(Gauges),
    Histogram(Histograms),
}

#[derive(Debug)]
struct Slot {
    instrument: Instrument,
    /// Series made so far; a race can only overcount it.
    series: AtomicUsize,
}

#[derive(Debug)]
struct Inner {
    registry: Registry,
    slots: HashMap<&'static str, Slot>,
    sources: Mutex<Vec<Source>>,
}

/// Brings values up to date that are counted elsewhere.
type Source = fn(&Metrics);

/// Every metric of the process. Clones share the values.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Inner>);

/// 1 ms to about 524 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 20))
}

/// 1 to 512.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 10))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(&BuildInfo::default())
    }
}

impl Metrics {
    /// Registers the whole table.
    pub fn new(build: &BuildInfo) -> Self {
        let mut registry = Registry::default();
        let mut slots = HashMap::new();
        for metric in names::ALL {
            let instrument = register(&mut registry, metric);
            slots.insert(
                metric.name,
                Slot {
                    instrument,
                    series: AtomicUsize::new(0),
                },
            );
        }
        let metrics = Self(Arc::new(Inner {
            registry,
            slots,
            sources: Mutex::default(),
        }));
        let labels = [build.version.as_str(), &build.git_sha, &build.profile];
        metrics.set(&names::BUILD_INFO, &labels, 1.0);
        metrics
    }

    /// Adds one to a counter.
    pub fn count(&self, metric: &Metric, labels: &[&str]) {
        self.add(metric, labels, 1);
    }

    /// Adds to a counter.
    pub fn add(&self, metric: &Metric, labels: &[&str], by: u64) {
        let Some(slot) = self.0.slots.get(metric.name) else {
            return;
        };
        if let Instrument::Counter(family) = &slot.instrument {
            let labels = pairs(metric, labels);
            if self.admits(slot, || family.get(&labels).is_some()) {
                family.get_or_create(&labels).inc_by(by);
            }
        }
    }

    /// Brings a counter to a total that is counted elsewhere; it never falls. For [`Metrics::read_from`]'s sources alone:
    /// two callers at once would add twice.
    pub fn reach(&self, metric: &Metric, labels: &[&str], total: u64) {
        let Some(slot) = self.0.slots.get(metric.name) else {
            return;
        };
        if let Instrument::Counter(family) = &slot.instrument {
            let known = family.get(&pairs(metric, labels));
            let so_far = known.map_or(0, |counter| counter.get());
            self.add(metric, labels, total.saturating_sub(so_far));
        }
    }

    /// Calls `source` before values are given out, one caller at a time. A source that is there already is not added again.
    pub fn read_from(&self, source: Source) {
        let mut sources = self
            .0
            .sources
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !sources
            .iter()
            .any(|known| std::ptr::fn_addr_eq(*known, source))
        {
            sources.push(source);
        }
    }

    /// Sets a gauge.
    pub fn set(&self, metric: &Metric, labels: &[&str], value: f64) {
        let Some(slot) = self.0.slots.get(metric.name) else {
            return;
        };
        if let Instrument::Gauge(family) = &slot.instrument {
            let labels = pairs(metric, labels);
            if self.admits(slot, || family.get(&labels).is_some()) {
                family.get_or_create(&labels).set(value);
            }
        }
    }

    /// Records a duration.
    pub fn observe(&self, metric: &Metric, labels: &[&str], duration: Duration) {
        self.record(metric, labels, duration.as_secs_f64());
    }

    /// Records a number in a distribution.
    pub fn record(&self, metric: &Metric, labels: &[&str], value: f64) {
        let Some(slot) = self.0.slots.get(metric.name) else {
            return;
        };
        if let Instrument::Histogram(family) = &slot.instrument {
            let labels = pairs(metric, labels);
            if self.admits(slot, || family.get(&labels).is_some()) {
                family.get_or_create(&labels).observe(value);
            }
        }
    }

    /// All values in OpenMetrics text.
    pub fn encode(&self) -> String {
        {
            let sources = self
                .0
                .sources
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            for source in sources.iter() {
                source(self);
            }
        }
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.0.registry);
        text
    }

    fn admits(&self, slot: &Slot, known: impl FnOnce() -> bool) -> bool {
        if known() {
            return true;
        }
        if slot.series.load(Ordering::Relaxed) < MAX_SERIES {
            slot.series.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let dropped = self.0.slots.get(names::SERIES_DROPPED.name);
        if let Some(Slot {
            instrument: Instrument::Counter(dropped),
            ..
        }) = dropped
        {
            dropped.get_or_create(&Vec::new()).inc();
        }
        false
    }
}

/// Label names with their values; missing values are empty, surplus ones are ignored.
fn pairs(metric: &Metric, values: &[&str]) -> Labels {
    debug_assert_eq!(
        metric.labels.len(),
        values.len(),
        "labels of {}",
        metric.name
    );
    let value = |index: usize| values.get(index).copied().unwrap_or_default().to_owned();
    metric
        .labels
        .iter()
        .enumerate()
        .map(|(index, &name)| (name, value(index)))
        .collect()
}

fn register(registry: &mut Registry, metric: &'static Metric) -> Instrument {
    match metric.kind {
        Kind::Counter => {
            let family = Counters::default();
            // The encoder appends the suffix itself.
            let name = metric.name.trim_end_matches("_total");
            registry.register(name, metric.help, family.clone());
            Instrument::Counter(family)
        }
        Kind::Gauge => {
            let family = Gauges::default();
            registry.register(metric.name, metric.help, family.clone());
            Instrument::Gauge(family)
        }
        Kind::Seconds | Kind::Size => {
            let make: fn() -> Histogram = if metric.kind == Kind::Seconds {
                seconds
            } else {
                sizes
            };
            let family = Histograms::new_with_constructor(make);
            registry.register(metric.name, metric.help, family.clone());
            Instrument::Histogram(family)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_elsewhere_is_brought_up_to_date_by_each_look() {
        use std::sync::atomic::{AtomicU64, Ordering};
        static TOTAL: AtomicU64 = AtomicU64::new(5);
        let metrics = Metrics::default();
        let source = |metrics: &Metrics| {
            let total = TOTAL.load(Ordering::Relaxed);
            metrics.reach(&names::UCX_BYTES, &["tcp", "get"], total);
        };
        metrics.read_from(source);
        metrics.read_from(source);
        let value = || {
            let text = metrics.encode();
            let line = text
                .lines()
                .find(|line| line.starts_with("omni_ucx_bytes_total{"));
            line.unwrap().rsplit(' ').next().unwrap().to_owned()
        };
        assert_eq!(value(), "5");
        assert_eq!(value(), "5");
        TOTAL.store(12, Ordering::Relaxed);
        assert_eq!(value(), "12");
        // A counter does not fall.
        TOTAL.store(3, Ordering::Relaxed);
        assert_eq!(value(), "12");
    }

    #[test]
    fn values_appear_under_their_table_names() {
        let metrics = Metrics::default();
        metrics.count(&names::ROUTER_REQUESTS, &["tiny", "OK"]);
        metrics.set(&names::ROUTER_QUEUE, &[], 3.0);
        metrics.observe(&names::ROUTER_QUEUE_WAIT, &[], Duration::from_millis(5));
        metrics.record(&names::STAGE_ROWS, &["dit-worker"], 4.0);
        let text = metrics.encode();
        for line in [
            "omni_router_requests_total{model=\"tiny\",code=\"OK\"} 1",
            "omni_router_queue_depth 3",
            "omni_router_queue_wait_seconds_count 1",
            "omni_stage_batch_rows_bucket{le=\"4.0\",stage=\"dit-worker\"} 1",
            "omni_build_info{",
        ] {
            assert!(text.contains(line), "no {line} in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn too_many_label_values_are_dropped_and_counted() {
        let metrics = Metrics::default();
        for model in 0..MAX_SERIES + 7 {
            metrics.count(&names::ROUTER_REQUESTS, &[&model.to_string(), "OK"]);
        }
        metrics.count(&names::ROUTER_REQUESTS, &["0", "OK"]);
        let text = metrics.encode();
        let series = text
            .lines()
            .filter(|l| l.starts_with("omni_router_requests_total"))
            .count();
        assert_eq!(series, MAX_SERIES);
        assert!(
            text.contains("omni_telemetry_series_dropped_total 7"),
            "{text}"
        );
    }
}
