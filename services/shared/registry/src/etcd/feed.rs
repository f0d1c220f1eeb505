//! A watch on etcd: every key at one revision, then every change after it. When that revision is
//! compacted away before the watch has caught up, it starts again with a fresh picture.
use std::{sync::Arc, time::Duration};

use base::{Code, Failure, limits::CONTROL_DEADLINE, task};
use etcd_client::{Event as EtcdEvent, EventType, GetOptions, WatchOptions, WatchStream};
use tokio::sync::mpsc;

use crate::{
    RegistryError, Update,
    etcd::{
        keys::Keys,
        link::{Link, failure},
        table::{Change, Table},
    },
    watch::Watch,
};

/// Keys read at once.
const PAGE: i64 = 256;
/// Most pages of one picture: beyond every bound of what a registry holds, thrice over.
const MAX_PAGES: usize = 256;
/// Largest answer that is decoded, in bytes.
const MAX_ANSWER_BYTES: usize = 48 * 1024 * 1024;
/// How often a quiet watch asks whether etcd is still there.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long etcd may say nothing before the watch counts as broken.
const MAX_SILENCE: Duration = CONTROL_DEADLINE;

type Updates = mpsc::Sender<Result<Update, RegistryError>>;

/// Starts a watch. The first picture is read before it returns.
pub(crate) async fn start(link: Arc<Link>, keys: Keys) -> Result<Watch, RegistryError> {
    let first = picture(&link, &keys).await?;
    Ok(follow_from(link, keys, first))
}

/// Passes on a picture and what came after it.
pub(crate) fn follow_from(link: Arc<Link>, keys: Keys, first: (Table, i64)) -> Watch {
    let (tx, rx) = mpsc::channel(1);
    let feeder = task::spawn(async move {
        let ended = feed(&link, &keys, first, &tx).await;
        if let Err(error) = ended {
            // The watcher may be gone as well.
            let _ = tx.send(Err(error)).await;
        }
    });
    Watch::new(rx, feeder)
}

/// Why a stream of changes ended.
enum End {
    /// Nobody reads any more.
    Unwanted,
    /// What comes next is no longer there.
    Compacted,
}

async fn feed(
    link: &Link,
    keys: &Keys,
    first: (Table, i64),
    tx: &Updates,
) -> Result<(), RegistryError> {
    let (mut table, mut revision) = first;
    loop {
        if tx.send(Ok(table.snapshot())).await.is_err() {
            return Ok(());
        }
        let stream = open(link, keys, revision).await?;
        let ended = follow(stream, &mut table, tx).await;
        match ended.inspect_err(|_| link.stream_broke())? {
            End::Unwanted => return Ok(()),
            End::Compacted => {
                tracing::info!(
                    revision,
                    "watch fell behind a compaction, reading everything"
                );
                (table, revision) = picture(link, keys).await?;
            }
        }
    }
}

/// Every key of the cluster at one revision.
pub(crate) async fn picture(link: &Link, keys: &Keys) -> Result<(Table, i64), RegistryError> {
    let end = range_end(keys.prefix());
    let mut from = keys.prefix().as_bytes().to_vec();
    let mut changes = Vec::new();
    let mut revision = 0;
    for _ in 0..MAX_PAGES {
        let mut options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
        if revision > 0 {
            options = options.with_revision(revision);
        }
        let (key, ask) = (from.clone(), options);
        let mut page = link
            .call("read every record", move |client| {
                let (key, ask) = (key.clone(), ask.clone());
                async move {
                    let client = client.kv_client();
                    let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
                    client.get(key, Some(ask)).await
                }
            })
            .await?;
        if revision == 0 {
            revision = page.header().map_or(0, |header| header.revision());
        }
        let more = page.more();
        for kv in page.take_kvs() {
            let written = unsigned(kv.mod_revision());
            let (key, value) = kv.into_key_value();
            changes.push(Change {
                key,
                value: Some(value),
                revision: written,
            });
        }
        match changes.last() {
            Some(last) if more => {
                // The next key after this one.
                from.clone_from(&last.key);
                from.push(0);
            }
            _ => return Ok((Table::new(keys.clone(), changes), revision)),
        }
    }
    Err(RegistryError::Remote(Failure::new(
        Code::ResourceExhausted,
        format!(
            "more than {MAX_PAGES} pages of keys under {}",
            keys.prefix()
        ),
    )))
}

async fn open(link: &Link, keys: &Keys, after: i64) -> Result<WatchStream, RegistryError> {
    let options = WatchOptions::new()
        .with_prefix()
        .with_fragment()
        .with_start_revision(after + 1);
    let prefix = keys.prefix();
    link.call("watch", |client| {
        let (prefix, options) = (prefix.to_owned(), options.clone());
        async move {
            let client = client.watch_client();
            let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
            client.watch(prefix, Some(options)).await
        }
    })
    .await
}

/// Passes changes on until the stream ends.
async fn follow(
    mut stream: WatchStream,
    table: &mut Table,
    tx: &Updates,
) -> Result<End, RegistryError> {
    let broken = |error| RegistryError::Remote(failure("watch", &error));
    let lost = |why: String| RegistryError::Remote(Failure::new(Code::Unavailable, why));
    loop {
        let Some(response) = heard(&mut stream, tx).await.map_err(broken)? else {
            return Ok(End::Unwanted);
        };
        let Some(response) = response else {
            return Err(lost(format!("etcd said nothing for {MAX_SILENCE:?}")));
        };
        if response.compact_revision() > 0 {
            return Ok(End::Compacted);
        }
        if response.canceled() {
            let reason = response.cancel_reason();
            return Err(lost(format!("etcd ended the watch: {reason}")));
        }
        let changes: Vec<_> = response.events().iter().filter_map(change).collect();
        for update in table.apply(&changes) {
            if tx.send(Ok(update)).await.is_err() {
                return Ok(End::Unwanted);
            }
        }
    }
}

/// The next thing etcd says, asking it to say something every [`PROBE_INTERVAL`]. Outer `None`: nobody
/// reads any more; inner `None`: silence.
async fn heard(
    stream: &mut WatchStream,
    tx: &Updates,
) -> Result<Option<Option<etcd_client::WatchResponse>>, etcd_client::Error> {
    let silence = tokio::time::sleep(MAX_SILENCE);
    tokio::pin!(silence);
    let mut probes = tokio::time::interval(PROBE_INTERVAL);
    probes.tick().await;
    loop {
        tokio::select! {
            message = stream.message() => {
                let ended = || etcd_client::Error::WatchError("the stream ended".to_owned());
                return message?.ok_or_else(ended).map(|message| Some(Some(message)));
            }
            () = tx.closed() => return Ok(None),
            () = &mut silence => return Ok(Some(None)),
            _ = probes.tick() => stream.request_progress().await?,
        }
    }
}

fn change(event: &EtcdEvent) -> Option<Change> {
    let kv = event.kv()?;
    let put = event.event_type() == EventType::Put;
    Some(Change {
        key: kv.key().to_vec(),
        value: put.then(|| kv.value().to_vec()),
        revision: unsigned(kv.mod_revision()),
    })
}

/// The first key that does not start with `prefix`, which ends in a slash.
fn range_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// Revisions and leases of etcd are never negative.
pub(crate) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
