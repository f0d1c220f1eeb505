use std::collections::HashMap;
use std::rc::Rc;

use crate::limits;
use fabric::{Endpoint, RemoteKey, UcxError, Worker};

/// Connections by worker address, kept between transfers.
#[derive(Debug)]
pub(super) struct Peers {
    worker: Rc<Worker>,
    peers: HashMap<Vec<u8>, Peer>,
    /// Counts uses, to find the longest unused peer.
    uses: u64,
}

#[derive(Debug)]
struct Peer {
    endpoint: Rc<Endpoint>,
    keys: HashMap<Vec<u8>, Rc<RemoteKey>>,
    last_use: u64,
}

impl Peers {
    pub(super) fn new(worker: &Rc<Worker>) -> Self {
        Self {
            worker: Rc::clone(worker),
            peers: HashMap::new(),
            uses: 0,
        }
    }

    /// The unpacked key of a region, connecting first where needed.
    pub(super) fn key(&mut self, address: &[u8], packed: &[u8]) -> Result<Rc<RemoteKey>, UcxError> {
        self.uses += 1;
        if !self.peers.contains_key(address) {
            self.make_room();
            let endpoint = Endpoint::connect(&self.worker, address)?;
            let peer = Peer {
                endpoint,
                keys: HashMap::new(),
                last_use: self.uses,
            };
            self.peers.insert(address.to_vec(), peer);
        }
        let Some(peer) = self.peers.get_mut(address) else {
            unreachable!("inserted above");
        };
        peer.last_use = self.uses;
        if let Some(key) = peer.keys.get(packed) {
            return Ok(Rc::clone(key));
        }
        let key = RemoteKey::unpack(&peer.endpoint, packed)?;
        if peer.keys.len() >= limits::MAX_KEYS_PER_PEER {
            // Keys of restarted pools: transfers that use one hold it themselves.
            peer.keys.clear();
        }
        peer.keys.insert(packed.to_vec(), Rc::clone(&key));
        Ok(key)
    }

    /// Cuts a connection that failed; the next transfer makes a new one.
    pub(super) fn cut(&mut self, endpoint: &Rc<Endpoint>) {
        endpoint.abort();
        self.peers
            .retain(|_, peer| !Rc::ptr_eq(&peer.endpoint, endpoint));
    }

    /// Cuts every connection.
    pub(super) fn cut_all(&mut self) {
        for (_, peer) in self.peers.drain() {
            peer.endpoint.abort();
        }
    }

    /// Drops the longest unused peer when there is no room for one more. Transfers under way hold
    /// their endpoint themselves, so it closes after them.
    fn make_room(&mut self) {
        if self.peers.len() < limits::MAX_PEERS {
            return;
        }
        let oldest = self.peers.iter().min_by_key(|(_, peer)| peer.last_use);
        if let Some(address) = oldest.map(|(address, _)| address.clone()) {
            self.peers.remove(&address);
        }
    }
}
