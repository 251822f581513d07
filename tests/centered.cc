// An op of one's own, which test_own_ops.py compiles: it subtracts the mean along an axis of a matrix.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

REGISTER_OP("Centered")
    .Input("x: float")
    .Output("y: float")
    .Attr("axis: int")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

class Centered : public tensorflow::OpKernel {
 public:
  explicit Centered(tensorflow::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("axis", &axis_));
  }
  void Compute(tensorflow::OpKernelContext* c) override {
    auto x = c->input(0).matrix<float>();
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, c->input(0).shape(), &output));
    auto y = output->matrix<float>();
    const int n = x.dimension(axis_), others = x.dimension(1 - axis_);
    for (int j = 0; j < others; ++j) {
      float sum = 0;
      for (int i = 0; i < n; ++i) sum += axis_ ? x(j, i) : x(i, j);
      for (int i = 0; i < n; ++i) {
        if (axis_) y(j, i) = x(j, i) - sum / n;
        else y(i, j) = x(i, j) - sum / n;
      }
    }
  }

 private:
  int axis_;
};

REGISTER_KERNEL_BUILDER(Name("Centered").Device(tensorflow::DEVICE_CPU), Centered);
