//! Many receivers: of the whole prefix, of their heads, of layers as they come.
use std::time::Duration;

use base::{clock, task};
use kv::KvShard;
use kv_transfer::{Description, FetchRequest, KvClient, TransferError};
use proto::v1::PrefixHandle;
use serde_json::{Value, json};

use super::{Bench, SHAPE, client, rate};
use crate::bench::median;
use crate::error::OmniError;

const PAGE_BYTES: usize = 4096;
/// What a producer needs to compute a layer.
const COMPUTE: Duration = Duration::from_millis(10);

/// Fetches a part and copies it out; gives the bytes read.
async fn take(
    client: KvClient,
    handle: PrefixHandle,
    part: Option<KvShard>,
) -> Result<u64, TransferError> {
    let fetched = client
        .fetch_part(FetchRequest {
            expected: Some(&SHAPE),
            part: part.as_ref(),
            ..FetchRequest::new(&handle, "bench", "bench")
        })
        .await?;
    let read = fetched.read_bytes;
    let copied = tokio::task::spawn_blocking(move || {
        fetched.to_vec()?;
        Ok::<_, TransferError>(fetched.lease)
    });
    let lease = copied.await.map_err(|_| TransferError::Stopped)??;
    client.release(lease).await?;
    Ok(read)
}

/// Runs receivers side by side, one for each part; gives the bytes read and the time.
async fn side_by_side(bench: &Bench, parts: Vec<Option<KvShard>>) -> Result<(u64, f64), OmniError> {
    let failed = |error| OmniError::of(&error);
    let published = bench.producer.publish(&bench.endpoint, bench.request());
    let published = published.await.map_err(failed)?;
    let clients: Vec<KvClient> = parts
        .iter()
        .map(|_| client(bench.transport))
        .collect::<Result<_, _>>()?;
    let start = clock::now();
    let receivers: Vec<_> = clients
        .into_iter()
        .zip(parts)
        .map(|(client, part)| task::spawn(take(client, published.handle.clone(), part)))
        .collect();
    let mut read = 0;
    for receiver in receivers {
        let taken = receiver.await.map_err(|_| failed(TransferError::Stopped))?;
        read += taken.map_err(failed)?;
    }
    let ms = clock::millis_since(start);
    bench
        .producer
        .release(published.lease)
        .await
        .map_err(failed)?;
    Ok((read, ms))
}

/// `count` receivers of the whole prefix.
pub(super) async fn out(bench: &Bench, count: usize) -> Result<Value, OmniError> {
    let (read, ms) = side_by_side(bench, vec![None; count]).await?;
    let read = usize::try_from(read).unwrap_or(usize::MAX);
    Ok(json!({"receivers": count, "bytes_read": read, "ms": ms, "gb_s": rate(read, ms)}))
}

/// Four receivers of a quarter of the heads, and two of a half.
pub(super) async fn reshard(bench: &Bench) -> Result<Value, OmniError> {
    let mut rows = vec![];
    for ranks in [4, 2] {
        let each = SHAPE.kv_heads / ranks;
        let part = |rank: usize| {
            Some(KvShard {
                heads: rank * each..(rank + 1) * each,
                ..KvShard::whole(&SHAPE, bench.tokens)
            })
        };
        let (read, ms) = side_by_side(bench, (0..ranks).map(part).collect()).await?;
        let of_payload = read as f64 / bench.bytes() as f64;
        rows.push(
            json!({"receivers": ranks, "bytes_read": read, "of_payload": of_payload, "ms": ms}),
        );
    }
    Ok(Value::Array(rows))
}

/// Memory whose pages are there: that of a model is not new either.
fn zeroed(bytes: usize) -> Vec<u8> {
    let mut room = vec![0; bytes];
    room.iter_mut()
        .step_by(PAGE_BYTES)
        .for_each(|byte| *byte = 1);
    room
}

/// A receiver that follows a producer layer by layer: how long after the last layer it is ready, beside how long
/// a layer takes.
pub(super) async fn layers(bench: &Bench) -> Result<Value, OmniError> {
    let failed = |error| OmniError::of(&error);
    let description = Description {
        request_id: "bench".to_owned(),
        identity: kv::PrefixIdentity([2; 32]),
        geometry: SHAPE,
        tokens: bench.tokens,
        cache: None,
    };
    let offered = bench.producer.offer(&bench.endpoint, description);
    let mut publication = offered.await.map_err(failed)?;
    let Some(handle) = publication.handle().cloned() else {
        return Err(failed(TransferError::Stopped));
    };
    let consumer = bench.consumer.clone();
    let follows = task::spawn(async move {
        // Ready is who has every byte, checked, in memory of its own.
        let request = FetchRequest::new(&handle, "bench", "bench");
        let (fetched, _bytes) = consumer.fetch_to(request, zeroed).await?;
        let ready = clock::now();
        consumer.release(fetched.lease).await?;
        Ok::<_, TransferError>(ready)
    });
    let layer = bench.bytes() / SHAPE.layers;
    let mut each = vec![];
    let mut last = clock::now();
    for _ in 0..SHAPE.layers {
        let bytes = vec![0x5a; layer];
        tokio::time::sleep(COMPUTE).await;
        last = clock::now();
        publication.write(bytes).await.map_err(failed)?;
        each.push(clock::millis_since(last));
    }
    let ready = follows.await.map_err(|_| failed(TransferError::Stopped))?;
    let after = ready.map_err(failed)?.saturating_duration_since(last);
    let published = publication.finish().await.map_err(failed)?;
    bench
        .producer
        .release(published.lease)
        .await
        .map_err(failed)?;
    Ok(json!({
        "layer_bytes": layer,
        "layer_write_ms": median(&each),
        "ready_after_begin_of_last_layer_ms": after.as_secs_f64() * 1e3,
    }))
}
