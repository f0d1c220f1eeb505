//! Who asks for an image, as far as the door knows: by an API key, or by a certificate.
use proto::{
    access::{Peer, Role},
    v1::{GenerateRequest, Priority},
};

use super::Context;
use crate::{RouterError, admission::Quota};

/// Scheme of keys in the header `authorization`.
const BEARER: &str = "bearer ";

/// Who a request comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Who pays for it; empty: nobody in particular.
    pub(crate) tenant: String,
    /// What that one may take; `None`: what everybody may.
    pub(crate) quota: Option<Quota>,
    /// The most urgent class it may ask for; `None`: any.
    pub(crate) ceiling: Option<Priority>,
    /// The span that it has the request in.
    pub(crate) trace: telemetry::trace::Parent,
    /// An operator, who may see and stop requests of all tenants.
    pub(crate) operator: bool,
}

impl Context {
    /// Who is asking. `authorization` is the header of that name, `peer` who the connection is with,
    /// where that is known. Where there are neither keys nor TLS, anybody may ask, with any key.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` for a key that is not known, or for nobody where somebody is needed.
    pub(crate) fn caller(
        &self,
        authorization: Option<&[u8]>,
        peer: Option<&Peer>,
    ) -> Result<Caller, RouterError> {
        let operator = peer.is_some_and(|peer| peer.is(Role::Admin));
        if let (Some(keys), Some(header)) = (&self.keys, authorization) {
            let grant = bearer(header).and_then(|key| keys.grant(key));
            let grant = grant.ok_or(RouterError::Unauthenticated(
                "the API key is not known here",
            ))?;
            return Ok(Caller {
                tenant: grant.tenant.clone(),
                quota: Some(grant.quota),
                ceiling: Some(grant.ceiling),
                operator,
                ..Caller::default()
            });
        }
        let client = peer.and_then(|peer| peer.name(Role::Client));
        match (client, peer, &self.keys) {
            (Some(tenant), _, _) => Ok(Caller {
                tenant: tenant.to_owned(),
                operator,
                ..Caller::default()
            }),
            _ if operator => Ok(Caller {
                operator,
                ..Caller::default()
            }),
            (None, None, None) => Ok(Caller {
                // Nobody can be told from anybody else.
                operator: true,
                ..Caller::default()
            }),
            (None, Some(_), None) => Err(RouterError::Unauthenticated(
                "a certificate of a client or an admin is needed here",
            )),
            (None, _, Some(_)) => Err(RouterError::Unauthenticated(
                "an API key is needed here: authorization: Bearer KEY",
            )),
        }
    }
}

impl Caller {
    /// Holds a request to the caller's most urgent class; one that names none gets none above it.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` for a request that asks for more.
    pub(crate) fn hold(&self, request: &mut GenerateRequest) -> Result<(), RouterError> {
        let Some(ceiling) = self.ceiling else {
            return Ok(());
        };
        // Numbers grow as urgency falls; a number that is none is refused elsewhere.
        let asked = request.priority;
        let unnamed = asked == Priority::Unspecified as i32;
        if unnamed && ceiling == Priority::Background {
            request.set_priority(ceiling);
        }
        if !unnamed && asked < ceiling as i32 {
            return Err(RouterError::PriorityDenied);
        }
        Ok(())
    }

    /// May this caller see and stop a request of `tenant`?
    pub(crate) fn owns(&self, tenant: &str) -> bool {
        self.operator || self.tenant == tenant
    }
}

fn bearer(header: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(header).ok()?;
    let (scheme, key) = text.split_at_checked(BEARER.len())?;
    scheme.eq_ignore_ascii_case(BEARER).then_some(key.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bearer_keys_are_read() {
        assert_eq!(bearer(b"Bearer omni-1"), Some("omni-1"));
        assert_eq!(bearer(b"bearer  omni-1 "), Some("omni-1"));
        for bad in [&b"Basic omni-1"[..], b"omni-1", b"", b"Bearer", b"\xff"] {
            assert_eq!(bearer(bad), None);
        }
    }

    #[test]
    fn nobody_gets_a_class_above_its_own() {
        let with = |ceiling| Caller {
            ceiling,
            ..Caller::default()
        };
        let held = |ceiling, priority: Priority| {
            let mut request = GenerateRequest {
                priority: priority.into(),
                ..Default::default()
            };
            with(ceiling)
                .hold(&mut request)
                .map(|()| request.priority())
        };
        use Priority::{Background, Interactive, Standard, Unspecified};
        assert_eq!(held(None, Interactive), Ok(Interactive));
        assert_eq!(held(Some(Interactive), Interactive), Ok(Interactive));
        assert_eq!(
            held(Some(Standard), Interactive),
            Err(RouterError::PriorityDenied)
        );
        assert_eq!(held(Some(Standard), Unspecified), Ok(Unspecified));
        assert_eq!(held(Some(Background), Unspecified), Ok(Background));
        assert_eq!(
            held(Some(Background), Standard),
            Err(RouterError::PriorityDenied)
        );
        assert_eq!(held(Some(Standard), Background), Ok(Background));
    }
}
