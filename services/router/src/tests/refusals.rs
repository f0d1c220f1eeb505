//! Requests that end before any stage hears of them, and refusals of the stages themselves.
use base::{Code, Failure, limits::MAX_PROMPT_CHARS};
use prost::{Message as _, bytes::BufMut as _};
use proto::{
    status::failure,
    v1::{
        CancelRequest, GenerateRequest, GenerateResponse, GetRequest, SizePolicy,
        generate_response::Event,
    },
};
use registry::Role;
use tonic::{
    Request, Status,
    client::Grpc,
    codec::{Codec, EncodeBuf, Encoder},
};
use tonic_prost::{ProstCodec, ProstDecoder};

use super::{
    Cluster, accepted, bounded,
    fake::{self, Act, Script},
    request,
};

/// Sends bytes as they are.
#[derive(Debug, Default)]
struct Raw;

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;
    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = GenerateResponse;
    type Encoder = Raw;
    type Decoder = ProstDecoder<GenerateResponse>;
    fn encoder(&mut self) -> Raw {
        Raw
    }
    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<(), GenerateResponse>::default().decoder()
    }
}

async fn send_raw(cluster: &Cluster, bytes: Vec<u8>) -> Result<(), Status> {
    let mut grpc = Grpc::new(cluster.channel.clone());
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/omni.v1.ImageService/Generate");
    bounded(grpc.server_streaming(Request::new(bytes), path, Raw))
        .await
        .map(|_| ())
}

struct Stages {
    cluster: Cluster,
    ar: Script,
    dit: Script,
    _running: [fake::Stage; 2],
}

async fn stages(ar: Script, dit: Script) -> Stages {
    let cluster = Cluster::start().await;
    let running = [
        fake::join(&cluster, Role::ArStage, "ar", &ar).await,
        fake::join(&cluster, Role::DitWorker, "dit", &dit).await,
    ];
    Stages {
        cluster,
        ar,
        dit,
        _running: running,
    }
}

#[tokio::test]
async fn bad_input_is_named_reaches_no_stage_and_the_next_request_works() {
    let stages = stages(Script::new([]), Script::new([])).await;
    type Change = fn(&mut GenerateRequest);
    let cases: [(&str, Change); 14] = [
        ("prompt", |r| r.prompt.clear()),
        ("prompt", |r| r.prompt = "a".repeat(MAX_PROMPT_CHARS + 1)),
        ("size", |r| r.size = "0x0".into()),
        ("size", |r| r.size = "1024x".into()),
        ("size", |r| r.size = "100000x10000".into()),
        ("size", |r| r.size = "63x64".into()),
        ("steps", |r| r.steps = Some(0)),
        ("steps", |r| r.steps = Some(-1)),
        ("steps", |r| r.steps = Some(201)),
        ("guidance", |r| r.guidance = Some(f64::NAN)),
        ("guidance", |r| r.guidance = Some(-3.0)),
        ("guidance", |r| r.guidance = Some(1e9)),
        ("seed", |r| r.seed = Some(1 << 63)),
        ("n", |r| r.n = 11),
    ];
    for (field, change) in cases {
        let mut bad = request("bad");
        change(&mut bad);
        let (events, error) = stages.cluster.run(bad).await;
        let error = failure(&error.unwrap());
        assert!(events.is_empty(), "{field}: {events:?}");
        assert_eq!(
            (error.code, error.field.as_deref()),
            (Code::InvalidArgument, Some(field))
        );
    }
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (0, 0));
    assert!(stages.cluster.run(request("good")).await.1.is_none());
}

#[tokio::test]
async fn an_unknown_field_is_refused_by_number() {
    let stages = stages(Script::new([]), Script::new([])).await;
    let mut bytes = request("one").encode_to_vec();
    prost::encoding::string::encode(99, &"x".to_owned(), &mut bytes);
    let error = failure(&send_raw(&stages.cluster, bytes).await.unwrap_err());
    assert_eq!(
        (error.code, error.field.as_deref()),
        (Code::InvalidArgument, Some("99"))
    );
    assert_eq!(error.message, "unknown field 99 in omni.v1.GenerateRequest");
    assert_eq!(stages.ar.calls(), 0);
    assert!(
        send_raw(&stages.cluster, request("two").encode_to_vec())
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn however_long_a_prompt_is_it_is_the_callers_fault() {
    let stages = stages(Script::new([]), Script::new([])).await;
    let send = async |bytes: usize| {
        let prompt = "a".repeat(bytes);
        let error = stages
            .cluster
            .run(GenerateRequest {
                prompt,
                ..request("one")
            })
            .await
            .1;
        failure(&error.unwrap())
    };
    let error = send(3_000_000).await;
    assert_eq!(
        (error.code, error.field.as_deref()),
        (Code::InvalidArgument, Some("prompt"))
    );
    let error = send(60_000_000).await;
    assert_eq!(error.code, Code::InvalidArgument);
    assert_eq!(error.message, "the message is larger than 50331648 bytes");
    assert!(stages.cluster.run(request("one")).await.1.is_none());
}

#[tokio::test]
async fn bytes_that_are_no_message_are_the_callers_fault() {
    let stages = stages(Script::new([]), Script::new([])).await;
    for bytes in [
        vec![0xff],
        vec![0x0a, 0x05, b'a'],
        vec![0x1a, 0x02, 0xff, 0xfe],
    ] {
        let error = failure(&send_raw(&stages.cluster, bytes).await.unwrap_err());
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
    }
}

#[tokio::test]
async fn a_size_is_snapped_only_on_demand_and_the_real_one_is_answered() {
    let stages = stages(Script::new([]), Script::new([])).await;
    let mut odd = request("odd");
    odd.size = "1000x300".into();
    let error = failure(&stages.cluster.run(odd.clone()).await.1.unwrap());
    assert_eq!(error.field.as_deref(), Some("size"));
    assert!(error.message.contains("128x32, 64x64"), "{error}");
    odd.set_size_policy(SizePolicy::Snap);
    let (events, error) = stages.cluster.run(odd).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(
        (accepted(&events).width, accepted(&events).height),
        (128, 32)
    );
    assert!(
        events
            .iter()
            .any(|e| matches!(e, Event::Image(image) if image.width == 128))
    );
}

#[tokio::test]
async fn an_unknown_model_and_unknown_requests_are_not_found() {
    let stages = stages(Script::new([]), Script::new([])).await;
    let mut other = request("one");
    other.model = "gpt-image".into();
    let error = failure(&stages.cluster.run(other).await.1.unwrap());
    assert_eq!(
        (error.code, error.field.as_deref()),
        (Code::NotFound, Some("model"))
    );
    let mut named = request("two");
    named.model = "tiny".into();
    assert!(stages.cluster.run(named).await.1.is_none());

    let mut client = stages.cluster.client.clone();
    let get = client
        .get(GetRequest {
            request_id: "nobody".into(),
        })
        .await
        .unwrap_err();
    let cancel = client
        .cancel(CancelRequest {
            request_id: "nobody".into(),
        })
        .await
        .unwrap_err();
    for status in [get, cancel] {
        let error = failure(&status);
        assert_eq!(
            (error.code, error.field.as_deref()),
            (Code::NotFound, Some("request_id"))
        );
    }
}

#[tokio::test]
async fn without_stages_a_good_request_is_unavailable_and_a_bad_one_still_bad() {
    let cluster = Cluster::start().await;
    let error = failure(&cluster.run(request("one")).await.1.unwrap());
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::Unavailable, "no ar-stage is ready")
    );
    let error = failure(&cluster.run(GenerateRequest::default()).await.1.unwrap());
    assert_eq!(
        (error.code, error.field.as_deref()),
        (Code::InvalidArgument, Some("prompt"))
    );

    let ar = Script::new([]);
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    cluster.members(1).await;
    let error = failure(&cluster.run(request("two")).await.1.unwrap());
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::Unavailable, "no dit-worker is ready")
    );
    assert_eq!(ar.calls(), 0);
}

#[tokio::test]
async fn stages_of_other_weights_make_no_image_together() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let other = proto::v1::ModelInfo {
        weights_id: "other".into(),
        ..fake::model()
    };
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join_model(&cluster, Role::DitWorker, "dit", &dit, other).await;
    cluster.members(2).await;
    let error = failure(&cluster.run(request("one")).await.1.unwrap());
    assert_eq!(error.code, Code::Unavailable);
    assert_eq!((ar.calls(), dit.calls()), (0, 0));
}

#[tokio::test]
async fn what_a_stage_refuses_passes_through_with_its_field() {
    let refusal = Failure::invalid("prompt", "prompt has 5000 tokens, the model takes 1024");
    let stages = stages(Script::new([Act::Refuse(refusal.clone())]), Script::new([])).await;
    let (events, error) = stages.cluster.run(request("one")).await;
    assert_eq!(failure(&error.unwrap()), refusal);
    assert_eq!(events.len(), 1, "accepted, then the error: {events:?}");
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (1, 0));
    assert!(stages.cluster.run(request("one")).await.1.is_none());
}
