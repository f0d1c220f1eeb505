//! Every process asks every other who it is.
use base::Code;
use integration_tests::cluster::{Up, bounded, request};
use proto::{
    access::Role,
    status::failure,
    v1::{
        DrainRequest, ListMembersRequest, Member, PrefillRequest, RegisterRequest,
        admin_service_client::AdminServiceClient, ar_stage_service_client::ArStageServiceClient,
        image_service_client::ImageServiceClient, registry_service_client::RegistryServiceClient,
    },
};
use tonic::transport::Channel;

use super::pki::{Pki, channel};

async fn generate(channel: Channel) -> Result<(), base::Failure> {
    let mut client = ImageServiceClient::new(channel)
        .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES);
    let asked = bounded(client.generate(request("a small boat"))).await;
    let mut stream = asked.map_err(|status| failure(&status))?.into_inner();
    loop {
        match bounded(stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(()),
            Err(status) => return Err(failure(&status)),
        }
    }
}

async fn members(channel: Channel) -> Result<Vec<Member>, base::Failure> {
    let mut client = AdminServiceClient::new(channel);
    let answer = bounded(client.list_members(ListMembersRequest {})).await;
    answer
        .map(|answer| answer.into_inner().members)
        .map_err(|status| failure(&status))
}

/// Old certificates, those of another authority, and no TLS at all.
async fn strangers_get_no_connection(pki: &Pki, endpoint: &str) {
    let other = Pki::new();
    let expired = pki.expired(Role::Admin);
    for tls in [expired, other.identity(Role::Admin)] {
        let refused = members(channel(tls, endpoint)).await.unwrap_err();
        assert_eq!(refused.code, Code::Unavailable, "{refused}");
    }
    let clear = endpoint.replace("https", "http");
    let refused = members(proto::channel::lazy(&clear).unwrap())
        .await
        .unwrap_err();
    assert_eq!(refused.code, Code::Unavailable, "{refused}");
}

#[tokio::test]
async fn every_role_may_do_its_own_work_and_strangers_nothing() {
    let pki = Pki::new();
    let dir = pki.dir().to_str().unwrap();
    let up = Up::start_with("shm", &["--tls-dir", dir]);
    let endpoint = up.endpoint();
    assert!(endpoint.starts_with("https://"), "{endpoint}");

    // Images for clients, administration for admins; the other way round not.
    generate(pki.channel(Role::Client, endpoint)).await.unwrap();
    let all = members(pki.channel(Role::Admin, endpoint)).await.unwrap();
    assert_eq!(
        all.len(),
        4,
        "router, ar-stage, kv-transfer, dit-worker: {all:?}"
    );
    assert!(
        all.iter()
            .all(|member| member.endpoint.starts_with("https://")),
        "{all:?}"
    );
    let denied = members(pki.channel(Role::Client, endpoint))
        .await
        .unwrap_err();
    assert_eq!(denied.code, Code::PermissionDenied);
    assert!(
        denied
            .message
            .starts_with("client may not call omni.v1.AdminService"),
        "{denied}"
    );

    // A worker neither administers, nor makes other stages work, nor joins as somebody else.
    let worker = || pki.channel(Role::DitWorker, endpoint);
    let drain = DrainRequest {
        member_id: all[0].id.clone(),
    };
    let denied = bounded(AdminServiceClient::new(worker()).drain(drain)).await;
    assert_eq!(failure(&denied.unwrap_err()).code, Code::PermissionDenied);
    let stage = all
        .iter()
        .find(|member| member.role() == proto::v1::Role::ArStage)
        .unwrap();
    let prefill = |channel| async {
        let mut client = ArStageServiceClient::new(channel);
        let asked = bounded(client.prefill(PrefillRequest::default())).await;
        failure(&asked.map(drop).unwrap_err())
    };
    let denied = prefill(pki.channel(Role::DitWorker, &stage.endpoint)).await;
    assert_eq!(denied.code, Code::PermissionDenied, "{denied}");
    let join = RegisterRequest {
        member: Some(Member {
            id: "impostor".to_owned(),
            endpoint: "https://127.0.0.1:1".to_owned(),
            ..stage.clone()
        }),
        ttl_ms: 5_000,
    };
    let denied = bounded(RegistryServiceClient::new(worker()).register(join)).await;
    let denied = failure(&denied.unwrap_err());
    let (code, field) = (denied.code, denied.field.as_deref());
    assert_eq!(
        (code, field),
        (Code::PermissionDenied, Some("role")),
        "{denied}"
    );

    // Without a certificate only the router answers, and it gives nothing away.
    let nobody = members(channel(pki.nobody(), endpoint)).await.unwrap_err();
    assert_eq!(nobody.code, Code::Unauthenticated);
    let nobody = generate(channel(pki.nobody(), endpoint)).await.unwrap_err();
    assert_eq!(nobody.code, Code::Unauthenticated);
    let nobody = prefill(channel(pki.nobody(), &stage.endpoint)).await;
    assert_eq!(nobody.code, Code::Unavailable, "{nobody}");

    strangers_get_no_connection(&pki, endpoint).await;
    // All of that was no harm.
    generate(pki.channel(Role::Admin, endpoint)).await.unwrap();
}
