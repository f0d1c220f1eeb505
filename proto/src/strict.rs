//! Strict decoding of what clients send: a field number that the contract does not name is an
//! error, not something to drop quietly. A misspelt option must not become a default.
use std::{
    collections::{HashMap, HashSet},
    marker::PhantomData,
    sync::OnceLock,
};

use base::Failure;
use prost::{Message, Name, bytes::Buf as _};
use prost_types::{DescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder},
};
use tonic_prost::{ProstCodec, ProstEncoder};

use crate::{DESCRIPTOR_SET, status::status};

/// Deepest nesting of messages that is looked at; prost refuses more than 100.
const MAX_DEPTH: usize = 32;

/// Only what clients send is checked: an old client may meet a newer server's answers.
const CHECKED_SUFFIX: &str = "Request";

/// Why a message was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StrictError {
    /// The contract does not name this field.
    #[error("unknown field {number} in {message}")]
    UnknownField {
        /// Field number.
        number: u32,
        /// Full name of the message.
        message: String,
    },
    /// The bytes are no protobuf message of this type.
    #[error("malformed {message}: {reason}")]
    Malformed {
        /// Full name of the message.
        message: String,
        /// What is wrong.
        reason: String,
    },
}

impl base::Fault for StrictError {
    fn code(&self) -> base::Code {
        base::Code::InvalidArgument
    }
}

impl StrictError {
    fn into_status(self) -> Status {
        let mut failure = Failure::of(&self);
        if let Self::UnknownField { number, .. } = self {
            failure.field = Some(number.to_string());
        }
        status(&failure)
    }
}

/// Fields of one message: number to the full name of the message it holds, if it holds one.
type Fields = HashMap<u32, Option<String>>;

/// Messages of the contract by full name.
fn schema() -> &'static HashMap<String, Fields> {
    static SCHEMA: OnceLock<HashMap<String, Fields>> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let set = FileDescriptorSet::decode(DESCRIPTOR_SET).unwrap_or_default();
        let mut messages = HashMap::new();
        for file in &set.file {
            for message in &file.message_type {
                collect(file.package(), message, &mut messages);
            }
        }
        messages
    })
}

fn collect(scope: &str, message: &DescriptorProto, into: &mut HashMap<String, Fields>) {
    let name = format!("{scope}.{}", message.name());
    let fields = message.field.iter().filter_map(|field| {
        let nested = (field.r#type() == Type::Message)
            .then(|| field.type_name().trim_start_matches('.').to_owned());
        Some((u32::try_from(field.number()).ok()?, nested))
    });
    into.insert(name.clone(), fields.collect());
    for nested in &message.nested_type {
        collect(&name, nested, into);
    }
}

/// Walks the tags of an encoded message.
///
/// # Errors
/// The first field, at any depth, that the contract does not name, or bytes that are no message.
pub fn check(message: &str, bytes: &[u8]) -> Result<(), StrictError> {
    walk(message, bytes, 0)
}

fn walk(message: &str, mut bytes: &[u8], depth: usize) -> Result<(), StrictError> {
    let malformed = |reason: &str| StrictError::Malformed {
        message: message.to_owned(),
        reason: reason.to_owned(),
    };
    let fields = schema()
        .get(message)
        .ok_or_else(|| malformed("no such message"))?;
    if depth > MAX_DEPTH {
        return Err(malformed("nested too deeply"));
    }
    while !bytes.is_empty() {
        let tag = varint(&mut bytes).ok_or_else(|| malformed("truncated tag"))?;
        let number = u32::try_from(tag >> 3).map_err(|_| malformed("field number too large"))?;
        let nested = fields
            .get(&number)
            .ok_or_else(|| StrictError::UnknownField {
                number,
                message: message.to_owned(),
            })?;
        let body = skip(&mut bytes, tag & 7).ok_or_else(|| malformed("truncated field"))?;
        if let (Some(inner), Some(name)) = (body, nested) {
            walk(name, inner, depth + 1)?;
        }
    }
    Ok(())
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Steps over one field; the inner `Some` is the content of a length-delimited one. Groups are not
/// part of the contract and count as malformed.
fn skip<'a>(bytes: &mut &'a [u8], wire: u64) -> Option<Option<&'a [u8]>> {
    let length = match wire {
        0 => return varint(bytes).map(|_| None),
        1 => 8,
        2 => usize::try_from(varint(bytes)?).ok()?,
        5 => 4,
        _ => return None,
    };
    let (body, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some((wire == 2).then_some(body))
}

/// The codec of services whose requests are decoded strictly.
#[derive(Debug)]
pub struct StrictCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for StrictCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for StrictCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Name + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = StrictDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        StrictDecoder(PhantomData)
    }
}

/// Decodes one message type, checking it first if it is a request.
#[derive(Debug)]
pub struct StrictDecoder<U>(PhantomData<U>);

impl<U: Message + Name + Default> Decoder for StrictDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = source.copy_to_bytes(source.remaining());
        if U::NAME.ends_with(CHECKED_SUFFIX) {
            check(&U::full_name(), &bytes).map_err(StrictError::into_status)?;
        }
        U::decode(bytes).map(Some).map_err(|error| {
            let reason = error.to_string();
            StrictError::Malformed {
                message: U::full_name(),
                reason,
            }
            .into_status()
        })
    }
}

/// Full names of the messages of the contract, for tests over all of them.
pub fn message_names() -> HashSet<&'static str> {
    schema().keys().map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::v1::{
        DenoiseRequest, GenerateRequest, InputImage, KvGeometry, PrefixHandle, PrefixRow, Sampling,
        input_image::Source,
    };

    fn full() -> GenerateRequest {
        GenerateRequest {
            request_id: "r-1".into(),
            model: "m".into(),
            prompt: "a fox".into(),
            size: "64x64".into(),
            size_policy: 2,
            steps: Some(-1),
            seed: Some(u64::MAX),
            guidance: Some(f64::NAN),
            template: "instruct".into(),
            system_prompt: "be kind".into(),
            n: 1,
            quality: 3,
            mode: 4,
            images: vec![InputImage {
                source: Some(Source::Data(vec![1, 2])),
            }],
            sampling: Some(Sampling {
                temperature: Some(0.5),
                ..Sampling::default()
            }),
            drop_think: Some(false),
            system_prompt_name: "none".into(),
            previews: 2,
            preview_kind: 1,
            priority: 1,
            align_image_size: true,
            on_prefix_loss: 2,
            transfer_timeout_ms: 1,
        }
    }

    #[test]
    fn the_contract_is_known_by_name() {
        for name in [
            GenerateRequest::full_name(),
            KvGeometry::full_name(),
            "omni.v1.ListSlotsResponse.Slot".to_owned(),
        ] {
            assert!(message_names().contains(name.as_str()), "{name}");
        }
    }

    #[test]
    fn every_known_field_passes() {
        assert_eq!(
            check("omni.v1.GenerateRequest", &full().encode_to_vec()),
            Ok(())
        );
    }

    #[test]
    fn an_unknown_field_is_named_with_its_message() {
        let mut bytes = full().encode_to_vec();
        prost::encoding::string::encode(99, &"x".to_owned(), &mut bytes);
        let error = check("omni.v1.GenerateRequest", &bytes).unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown field 99 in omni.v1.GenerateRequest"
        );
    }

    #[test]
    fn an_unknown_field_in_a_nested_message_is_found() {
        let request = DenoiseRequest {
            rows: vec![PrefixRow {
                kind: 1,
                prefix: Some(PrefixHandle::default()),
            }],
            ..Default::default()
        };
        let mut inner = request.rows[0].encode_to_vec();
        prost::encoding::uint64::encode(77, &5, &mut inner);
        let mut bytes = Vec::new();
        prost::encoding::bytes::encode(4, &inner, &mut bytes);
        let error = check("omni.v1.DenoiseRequest", &bytes).unwrap_err();
        assert_eq!(error.to_string(), "unknown field 77 in omni.v1.PrefixRow");
        assert_eq!(
            check("omni.v1.DenoiseRequest", &request.encode_to_vec()),
            Ok(())
        );
    }

    #[test]
    fn truncated_bytes_and_groups_are_malformed() {
        let bytes = full().encode_to_vec();
        let cut = &bytes[..bytes.len() - 1];
        assert!(matches!(
            check("omni.v1.GenerateRequest", cut),
            Err(StrictError::Malformed { .. })
        ));
        // Field 1 as the start of a group.
        assert!(matches!(
            check("omni.v1.GenerateRequest", &[0x0b]),
            Err(StrictError::Malformed { .. })
        ));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = check("omni.v1.GenerateRequest", &bytes);
            let _ = check("omni.v1.DenoiseRequest", &bytes);
        }
    }
}
