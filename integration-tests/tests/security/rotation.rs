//! Certificates are replaced under load.
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use base::clock;
use integration_tests::cluster::{Up, bounded, request};
use proto::{access::Role, v1::image_service_client::ImageServiceClient};
use tonic::{Status, transport::Channel};

use super::pki::Pki;

/// How long new files may take until they are used.
const USED: Duration = Duration::from_secs(60);
const CLIENTS: usize = 3;

async fn generate(channel: Channel) -> Result<(), Status> {
    let mut client = ImageServiceClient::new(channel)
        .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES);
    let mut stream = bounded(client.generate(request("a small boat")))
        .await?
        .into_inner();
    while bounded(stream.message()).await?.is_some() {}
    Ok(())
}

async fn shown(pki: &Pki, site: &str) -> Vec<u8> {
    let stream = pki.connect(site).await;
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_under_load_without_a_failed_request() {
    let pki = Arc::new(Pki::new());
    let up = Up::start_with("shm", &["--tls-dir", pki.dir().to_str().unwrap()]);
    let endpoint = up.endpoint().to_owned();
    let admin = up.admin("dit-worker");
    let sites = [endpoint.as_str(), up.http(), &admin];
    let mut before = Vec::new();
    for site in sites {
        before.push(shown(&pki, site).await);
    }

    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    for index in 0..CLIENTS {
        let (pki, endpoint) = (pki.clone(), endpoint.clone());
        let (stop, done) = (stop.clone(), done.clone());
        clients.push(base::task::spawn(async move {
            let kept = pki.channel(Role::Client, &endpoint);
            while !stop.load(Ordering::Acquire) {
                // One keeps its connection; the others connect anew, with the certificate of the day.
                let channel = match index {
                    0 => kept.clone(),
                    _ => pki.channel(Role::Client, &endpoint),
                };
                generate(channel).await?;
                done.fetch_add(1, Ordering::AcqRel);
            }
            Ok::<_, Status>(())
        }));
    }
    let finished = |count: usize| {
        let done = done.clone();
        async move {
            while done.load(Ordering::Acquire) < count {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    bounded(finished(CLIENTS)).await;
    // Not while a client reads the files: a pair of old and new is the reader's to notice.
    let renewed = pki.clone();
    tokio::task::spawn_blocking(move || renewed.renew())
        .await
        .unwrap();
    let start = clock::now();
    for (site, before) in sites.iter().zip(before) {
        while shown(&pki, site).await == before {
            assert!(
                start.elapsed() < USED,
                "{site} does not use the new files:\n{}",
                up.log()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    bounded(finished(done.load(Ordering::Acquire) + 2 * CLIENTS)).await;
    stop.store(true, Ordering::Release);
    for client in clients {
        client.await.unwrap().unwrap();
    }
    let log = up.log();
    for role in ["router", "kv-transfer", "ar-stage", "dit-worker"] {
        let said =
            |line: &str| line.starts_with(&format!("[{role}]")) && line.contains("read again");
        assert!(
            log.lines().any(said),
            "{role} still has its old certificate:\n{log}"
        );
    }
}
