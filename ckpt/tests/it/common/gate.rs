//! A store whose writers can be blocked or made to fail.

use std::sync::{Arc, Condvar, Mutex};

use storage::testing::fault_store::HookLayer;
use storage::{Key, Result, Storage};

/// What a [`Gate`] does with new objects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateState {
    Open,
    /// Creating an object blocks.
    Closed,
    /// Creating an object fails.
    Broken,
    /// Creating a tensor file fails for lack of space.
    Full,
    /// Creating a tensor file panics.
    Panics,
}

/// A store that blocks writers until it is opened.
#[derive(Clone)]
pub struct Gate {
    store: Arc<dyn Storage>,
    state: Arc<(Mutex<GateState>, Condvar)>,
}

impl Gate {
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        let state = Arc::new((Mutex::new(GateState::Open), Condvar::new()));
        let at_gate = Arc::clone(&state);
        let store =
            HookLayer::new(
                inner,
                move |_, call, key| {
                    if call == "create" { pass(&at_gate, key) } else { Ok(()) }
                },
            );
        Gate { store, state }
    }

    pub fn store(&self) -> Arc<dyn Storage> {
        Arc::clone(&self.store)
    }

    pub fn set(&self, state: GateState) {
        *self.state.0.lock().unwrap() = state;
        self.state.1.notify_all();
    }
}

fn pass(gate: &(Mutex<GateState>, Condvar), key: &Key) -> Result<()> {
    let state =
        *gate.1.wait_while(gate.0.lock().unwrap(), |state| *state == GateState::Closed).unwrap();
    match state {
        GateState::Broken => Err(device_error(key)),
        GateState::Full if key.as_str().ends_with(".safetensors") => {
            let object = key.as_str().to_owned();
            Err(storage::Error::NoSpace { object, need_bytes: 4096, free_bytes: Some(17) })
        }
        GateState::Panics if key.as_str().ends_with(".safetensors") => panic!("device failed"),
        GateState::Open | GateState::Closed | GateState::Full | GateState::Panics => Ok(()),
    }
}

/// The error of a failed device.
pub fn device_error(key: &Key) -> storage::Error {
    storage::Error::from_io("reach", key.as_str(), std::io::Error::other("device failed"))
}
