// Declared for pointers that pass through; defined inside libtorch.
#pragma once

namespace gloo {
namespace transport {

class Device;
class UnboundBuffer;

}  // namespace transport
}  // namespace gloo
