// Quicksort with a stack in shared memory. The threads of a CTA share the stack, and two of them sort each array.
__device__ void exchange(int& a, int& b) {
  int t = a;
  a = b;
  b = t;
}

__device__ int divided(int* a, int low, int high) {
  int pivot = a[high], i = low - 1;
  for (int j = low; j < high; j++)
    if (a[j] <= pivot) exchange(a[++i], a[j]);
  exchange(a[i + 1], a[high]);
  return i + 1;
}

__global__ void sort(int* data, int n) {
  __shared__ int stack[64];
  int* a = data + threadIdx.x / 2 * n;
  int top = -1;
  stack[++top] = 0;
  stack[++top] = n - 1;
  while (top >= 0) {
    int high = stack[top--], low = stack[top--];
    if (low < 0 || high >= n || low >= high) continue;
    int p = divided(a, low, high);
    if (p - 1 > low && top < 60) {
      stack[++top] = low;
      stack[++top] = p - 1;
    }
    if (p + 1 < high && top < 60) {
      stack[++top] = p + 1;
      stack[++top] = high;
    }
  }
}

int main() {
  const int n = 12, arrays = 32;
  int *data, host[n * arrays];
  for (int i = 0; i < n * arrays; i++) host[i] = i * 7919 % 1009;
  cudaMalloc(&data, sizeof host);
  cudaMemcpy(data, host, sizeof host, cudaMemcpyHostToDevice);
  sort<<<1, 2 * arrays>>>(data, n);
  cudaDeviceSynchronize();
  return 0;
}
