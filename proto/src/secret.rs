//! The Debug form of messages with tokens, keys or addresses in them: these are left out, so that no log line
//! lets its reader into a pool.
use std::fmt;

use crate::v1::{GrantResponse, PrefixHandle, RemoteRegion};

impl fmt::Debug for PrefixHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixHandle")
            .field("identity", &self.identity)
            .field("endpoint", &self.endpoint)
            .field("generation", &self.generation)
            .field("slot", &self.slot)
            .field("tokens", &self.tokens)
            .field("bytes", &self.bytes)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRegion")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for GrantResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrantResponse").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_token_key_or_address_is_shown() {
        let secret = vec![201, 202, 203];
        let handle = PrefixHandle {
            pull_token: secret.clone(),
            ..PrefixHandle::default()
        };
        let region = RemoteRegion {
            worker_address: secret.clone(),
            rkey: secret.clone(),
            address: 201_202_203,
            bytes: 7,
        };
        let token = GrantResponse { token: secret };
        let shown = format!("{handle:?} {region:?} {token:?}");
        assert!(!shown.contains("201"), "{shown}");
        assert!(shown.contains("bytes: 7"), "{shown}");
    }
}
