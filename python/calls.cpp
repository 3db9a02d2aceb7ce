#include <ATen/ops/empty.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace dmtp {
namespace {

template <class T>
void put(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

bool put_tensor(std::string& out, const at::Tensor& tensor) {
  // sizes of other layouts are not all there is to them, symbolic ones are not numbers
  if (tensor.layout() != at::kStrided || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return false;
  }
  put(out, tensor.scalar_type());
  put(out, tensor.device().type());
  put(out, tensor.device().index());
  put(out, static_cast<int>(tensor.dim()));
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    put(out, tensor.size(i));
    put(out, tensor.stride(i));
  }
  return true;
}

// The inputs and outputs of a call, their lists, the tensors in these.
constexpr int kDeepest = 3;

bool put_value(std::string& out, PyObject* value, int depth) {
  if (THPVariable_Check(value)) {
    out += 'T';
    return put_tensor(out, THPVariable_Unpack(value));
  }
  if (value == Py_None) {
    out += 'N';
    return true;
  }
  if (PyBool_Check(value)) {
    out += value == Py_True ? '1' : '0';
    return true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    out += 'I';
    put(out, PyLong_AsLongLongAndOverflow(value, &overflow));
    return overflow == 0;
  }
  if (PyFloat_CheckExact(value)) {
    out += 'F';
    put(out, PyFloat_AS_DOUBLE(value));
    return true;
  }
  if (PyUnicode_CheckExact(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == nullptr) {
      throw py::error_already_set();
    }
    out += 'S';
    put(out, size);
    out.append(text, size);
    return true;
  }
  if (depth < kDeepest && (PyList_CheckExact(value) || PyTuple_CheckExact(value))) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    out += PyList_CheckExact(value) ? 'L' : 'U';
    put(out, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!put_value(out, PySequence_Fast_GET_ITEM(value, i), depth + 1)) {
        return false;
      }
    }
    return true;
  }
  return false;
}

std::optional<py::bytes> signature(const py::list& values) {
  std::string out;
  if (!put_value(out, values.ptr(), 0)) {
    return std::nullopt;
  }
  return py::bytes(out);
}

py::list allocate(const py::list& wanted, const py::object& device) {
  if (!THPDevice_Check(device.ptr())) {
    throw py::type_error("device: must be a torch.device");
  }
  const at::Device on = reinterpret_cast<THPDevice*>(device.ptr())->device;
  py::list out;
  for (const auto& one : wanted) {
    const auto pair = py::reinterpret_borrow<py::tuple>(one);
    const py::tuple sizes = pair[0];
    const py::object kind = pair[1];
    if (!THPDtype_Check(kind.ptr())) {
      throw py::type_error("wanted: each entry must be a shape and a torch.dtype");
    }
    const auto dtype = reinterpret_cast<THPDtype*>(kind.ptr())->scalar_type;
    std::vector<int64_t> shape;
    for (const auto& size : sizes) {
      shape.push_back(size.cast<int64_t>());
    }
    out.append(py::cast(at::empty(shape, at::TensorOptions(dtype).device(on))));
  }
  return out;
}

}  // namespace

void bind_calls(py::module_& m) {
  m.def("signature", &signature, py::arg("values"),
        "All that argument checks see of a call: of tensors dtype, device, shape and strides, of the rest the value. "
        "None where that is not all.");
  m.def("allocate", &allocate, py::arg("wanted"), py::arg("device"), "Tensors of the (shape, dtype) pairs.");
}

}  // namespace dmtp
