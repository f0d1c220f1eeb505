//! Bad input gives one typed error that names the field, and the next request works.
use base::{Code, Failure};
use prost::Message;
use proto::v1::{GenerateRequest, GenerateResponse};

use crate::harness::{Up, bounded, refused, request};

type Spoil = fn(&mut GenerateRequest);

const CASES: [(&str, &str, Spoil); 20] = [
    ("empty prompt", "prompt", |r| r.prompt.clear()),
    ("blank size", "size", |r| " ".clone_into(&mut r.size)),
    ("prompt of too many characters", "prompt", |r| {
        r.prompt = "a".repeat(32_001)
    }),
    ("prompt of too many tokens", "prompt", |r| {
        r.prompt = "word and ".repeat(3_000)
    }),
    ("size zero", "size", |r| "0x0".clone_into(&mut r.size)),
    ("size odd", "size", |r| "255x257".clone_into(&mut r.size)),
    ("size cut short", "size", |r| {
        "1024x".clone_into(&mut r.size)
    }),
    ("size enormous", "size", |r| {
        "100000x10000".clone_into(&mut r.size)
    }),
    ("size negative", "size", |r| {
        "-256x256".clone_into(&mut r.size)
    }),
    ("steps 0", "steps", |r| r.steps = Some(0)),
    ("steps -1", "steps", |r| r.steps = Some(-1)),
    ("steps 201", "steps", |r| r.steps = Some(201)),
    ("guidance NaN", "guidance", |r| r.guidance = Some(f64::NAN)),
    ("guidance -3", "guidance", |r| r.guidance = Some(-3.0)),
    ("guidance 1e9", "guidance", |r| r.guidance = Some(1e9)),
    ("seed 2^63", "seed", |r| r.seed = Some(1 << 63)),
    ("template", "template", |r| {
        "chat".clone_into(&mut r.template)
    }),
    ("request id", "request_id", |r| {
        "a/b".clone_into(&mut r.request_id)
    }),
    ("size policy", "size_policy", |r| r.size_policy = 9),
    ("eleven images", "n", |r| r.n = 11),
];

#[tokio::test]
async fn each_bad_field_is_named_and_the_next_request_is_accepted() {
    let up = Up::shared();
    for (what, field, spoil) in CASES {
        let mut bad = request("a boat");
        spoil(&mut bad);
        let failure = refused(up, bad).await;
        assert_eq!(failure.code, Code::InvalidArgument, "{what}: {failure}");
        assert_eq!(failure.field.as_deref(), Some(field), "{what}: {failure}");
        assert!(failure.message.contains(field), "{what}: {failure}");
        assert_eq!(failure.message.lines().count(), 1, "{what}: {failure}");
    }
    let mut stream = bounded(up.client().generate(request("a boat")))
        .await
        .unwrap()
        .into_inner();
    assert!(bounded(stream.message()).await.unwrap().is_some());
}

/// A request with a field that the schema does not have.
#[derive(Clone, PartialEq, Message)]
struct Stranger {
    #[prost(string, tag = "3")]
    prompt: String,
    #[prost(uint32, tag = "99")]
    surprise: u32,
}

#[tokio::test]
async fn an_unknown_field_is_refused_by_its_number() {
    let up = Up::shared();
    let mut grpc = tonic::client::Grpc::new(up.channel());
    bounded(grpc.ready()).await.unwrap();
    let codec = tonic_prost::ProstCodec::<Stranger, GenerateResponse>::default();
    let path = http::uri::PathAndQuery::from_static("/omni.v1.ImageService/Generate");
    let stranger = Stranger {
        prompt: "a boat".to_owned(),
        surprise: 1,
    };
    let call = grpc.server_streaming(tonic::Request::new(stranger), path, codec);
    let status = match bounded(call).await {
        Err(status) => status,
        Ok(stream) => bounded(stream.into_inner().message()).await.unwrap_err(),
    };
    let failure: Failure = proto::status::failure(&status);
    assert_eq!(failure.code, Code::InvalidArgument, "{failure}");
    assert!(failure.message.contains("99"), "{failure}");
}
