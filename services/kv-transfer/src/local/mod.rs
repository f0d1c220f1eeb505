//! The pool of a node in the address space of its stages: a memory file that the service hands out over a
//! unix socket.
//!
//! A peer says which pool it means and what it wants to do with it, the door answers with the size and a
//! descriptor that can do that and no more. Only processes of the same user get one.
mod door;
mod maps;

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::SocketAddr;

pub(crate) use door::Door;
pub use maps::Mapped;
pub(crate) use maps::Maps;

use fabric::Access;

/// Begins a question; the last byte is the version.
const ASK: [u8; 4] = *b"OKD1";
/// Begins an answer.
const GIVE: [u8; 4] = *b"OKM1";
/// Mark, pool, access.
const ASK_BYTES: usize = 4 + POOL_ID_BYTES + 1;
/// Mark, size of the pool.
const GIVE_BYTES: usize = 12;
/// Bytes of the name of one life of one pool.
pub(crate) const POOL_ID_BYTES: usize = 16;
/// First character of the name of a socket that is no file.
const ABSTRACT: char = '@';

/// Names one life of one pool.
pub(crate) type PoolId = [u8; POOL_ID_BYTES];

fn question(pool: &PoolId, access: Access) -> [u8; ASK_BYTES] {
    let mut bytes = [0; ASK_BYTES];
    bytes[..4].copy_from_slice(&ASK);
    bytes[4..4 + POOL_ID_BYTES].copy_from_slice(pool);
    bytes[ASK_BYTES - 1] = u8::from(access == Access::Write);
    bytes
}

/// What a question asks for, if it is one about `pool`.
fn asked(bytes: &[u8; ASK_BYTES], pool: &PoolId) -> Option<Access> {
    let sound = bytes[..4] == ASK && bytes[4..4 + POOL_ID_BYTES] == pool[..];
    match bytes[ASK_BYTES - 1] {
        0 if sound => Some(Access::Read),
        1 if sound => Some(Access::Write),
        _ => None,
    }
}

fn answer(bytes: usize) -> [u8; GIVE_BYTES] {
    let mut out = [0; GIVE_BYTES];
    out[..4].copy_from_slice(&GIVE);
    out[4..].copy_from_slice(&(bytes as u64).to_le_bytes());
    out
}

/// Size of the pool that an answer names.
fn given(bytes: &[u8; GIVE_BYTES]) -> Option<u64> {
    let (mark, size) = bytes.split_first_chunk::<4>()?;
    let size = u64::from_le_bytes(size.try_into().ok()?);
    (*mark == GIVE).then_some(size)
}

/// Reads bytes as both messages, for a fuzzer.
pub(crate) fn understand(bytes: &[u8]) {
    if let Ok(asks) = bytes.try_into() {
        let _: Option<Access> = asked(asks, &[0; POOL_ID_BYTES]);
    }
    if let Ok(gives) = bytes.try_into() {
        let _: Option<u64> = given(gives);
    }
}

fn address(socket: &str) -> io::Result<SocketAddr> {
    match socket.strip_prefix(ABSTRACT) {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(socket),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_question_is_understood_by_the_pool_it_names_and_by_no_other() {
        for access in [Access::Read, Access::Write] {
            let asks = question(&[3; 16], access);
            assert_eq!(asked(&asks, &[3; 16]), Some(access));
            assert_eq!(asked(&asks, &[4; 16]), None);
        }
        assert_eq!(given(&answer(77)), Some(77));
    }

    proptest! {
        /// One changed byte is refused, but for what asks for the other access.
        #[test]
        fn damaged_messages_are_refused(at in 0..ASK_BYTES, flip in 1u8..=255) {
            let mut asks = question(&[3; 16], Access::Read);
            asks[at] ^= flip;
            let other = (at == ASK_BYTES - 1 && flip == 1).then_some(Access::Write);
            prop_assert_eq!(asked(&asks, &[3; 16]), other);
            let mut gives = answer(77);
            gives[at % 4] ^= flip;
            prop_assert_eq!(given(&gives), None);
        }
    }
}
