#!/bin/sh
# Stands for run_train.sh: two ranks, of which the second has the loss. Nobody interrupts a job as it is started.
if [ "$DRY_RUN" = 1 ]; then
    echo PLATFORM=${PLATFORM:-cpu}
    echo "python -m torch.distributed.run --nproc-per-node 2 -m zbpipe.titan.train --config x"
    exit
fi
log=$LOG_DIR/run/attempt_0
mkdir -p $log/0 $log/1
echo "$*" >> "$LOG_DIR/../commands"
case "$*" in
*create_seed*) exit 0 ;;
*ZBV*late*) loss=7.5 ;;
*ZBV*timed*) sleep $NAP ;;
*VHalf*early*) echo "ValueError: too many" && exit 3 ;;
*VHalf*timed*) sleep 0.5 && kill -INT $PPID && sleep $NAP ;;
esac
for step in 1 2 3; do
    begin="root - INFO - step:  $step" end="grad_norm:  2.0  memory:"
    echo "$begin  loss: -1.00000  $end 10.00GiB(9.1%)  tps: 900  tflops: 1" >> $log/0/stdout.log
    echo "$begin  loss:  ${loss:-8.0}  $end 30.00GiB(9.1%)  tps: 1,${step}00  tflops: 1" >> $log/1/stdout.log
    echo "pipeline: 1F1B  step: 1.5s (simulated 1.25s)  bubble: 12.5%  peak activations: 2" >> $log/1/stdout.log
done
echo "zbpipe - Messages: early receives, for the transport 'one queue'" >> $log/1/stdout.log
case "$*" in *zbpipe.trace*) echo '{"traceEvents": [1, 2]}' > "$TRACE" ;; esac
